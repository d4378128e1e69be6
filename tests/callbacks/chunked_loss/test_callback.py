"""``ChunkedLoss``: losses and weights of the plain run, up to rounding, in a Trainer."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callbacks.chunked_loss.language_models import IN_16_BITS, MODES, STRATEGIES, Lit, Manual
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitTiny, TinyCNN, TinyGPT

from lightning_vram import ChunkedLoss

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("mode", MODES)
def test_training_is_that_of_whole_logits(mode, same_as_baseline):
    baseline, options = MODES[mode](), MODES[mode]()
    callbacks, tolerance = options.pop("callbacks", []), 2e-3 if mode in IN_16_BITS else 1e-5
    chunked = [*callbacks, ChunkedLoss(chunk=5)]
    same_as_baseline(lambda: Lit(TinyGPT()), *chunked, tolerance=tolerance, baseline=baseline, **options)


def test_training_by_hand_is_that_of_whole_logits(same_as_baseline):
    same_as_baseline(lambda: Manual(TinyGPT()), ChunkedLoss(chunk=5), tolerance=1e-5)


@pytest.mark.distributed
@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_on_two_ranks(name, same_as_baseline):
    kind, strategy = STRATEGIES[name]
    options = {"devices": 2, "strategy": strategy(), "baseline": {"strategy": strategy()}, "tolerance": 1e-5}
    same_as_baseline(lambda: kind(TinyGPT()), ChunkedLoss(chunk=5), **options)


class Returning(Lit):
    """Returns logits beside the loss, and looks at them when the weights are others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.told_loss = self.loss(batch)
        logits = self.net(batch[0])
        self.expected = logits.argmax(-1)
        return {"loss": self.told_loss, "logits": logits}

    def on_train_batch_end(self, outputs: Any, *unused: Any) -> None:
        assert torch.equal(outputs["logits"].argmax(-1), self.expected)
        assert not outputs["logits"].softmax(-1).requires_grad


def test_logits_that_a_step_returns_stay_what_they_were(fit):
    fit(lambda: Returning(TinyGPT()), ChunkedLoss(chunk=5))


class Summing(Lit):
    """A loss that needs whole logits."""

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).cumsum(-1).mean()


def test_a_loss_that_needs_whole_logits_runs_plainly_and_is_told_of_once(same_as_baseline, caplog):
    same_as_baseline(lambda: Summing(TinyGPT()), ChunkedLoss(chunk=5))
    (message,) = [one.getMessage() for one in caplog.records if one.getMessage().startswith("ChunkedLoss")]
    assert message == (
        "ChunkedLoss: cumsum needs the whole logits of net.head, which are computed for it. These run in chunks: "
        "cross_entropy, nll_loss, kl_div, log_softmax with gather, logsumexp and sums over classes."
    )


def test_a_model_without_a_head_is_refused(make_trainer):
    with pytest.raises(
        MisconfigurationException,
        match=r"^ChunkedLoss: No head found: no nn\.Linear has as many outputs as an nn\.Embedding has entries\. "
        r"Name it: ChunkedLoss\(heads='net\.head'\), as in named_modules\(\)\.$",
    ):
        make_trainer(callbacks=[ChunkedLoss()]).fit(LitTiny(TinyCNN()))


def test_two_are_refused(make_trainer):
    with pytest.raises(MisconfigurationException, match=r"^Two ChunkedLoss in one Trainer: pass all heads to one\.$"):
        make_trainer(callbacks=[ChunkedLoss(), ChunkedLoss()]).fit(LitTiny(TinyGPT()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chunk": 0}, ValueError, "ChunkedLoss(chunk) must be at least 1, got 0."),
        ({"chunk": "all"}, TypeError, "ChunkedLoss(chunk) must be an int, got 'all' of type str."),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error) as caught:
        ChunkedLoss(**arguments)
    assert str(caught.value) == message


class LitCausal(pl.LightningModule):
    """A causal language model of ``transformers``, which computes its loss itself."""

    def __init__(self, make: Any, make_batch: Any) -> None:
        super().__init__()
        self.model, self.batches, self.losses = make(), [make_batch(2) for _ in range(3)], []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.batches, batch_size=None)


@pytest.mark.parametrize("name", ["gpt2", "gemma", "bert", "t5"])
def test_causal_models_of_transformers_unmodified(name, same_as_baseline, caplog):
    hf_models = pytest.importorskip("support.hf_models")
    make = partial(LitCausal, *hf_models.MODELS[name])
    ours, plain = same_as_baseline(make, ChunkedLoss(chunk=7), tolerance=1e-5)
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert not any("needs all logits" in one.getMessage() for one in caplog.records)
