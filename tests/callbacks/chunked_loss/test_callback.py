"""``ChunkedLoss``: losses and weights of the plain run, up to rounding, in a Trainer."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import Forking, ForkingOffload, LitManual, LitTiny, TinyCNN, TinyGPT, describe_module, fail_in
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_vram import (
    ActivationCheckpointing,
    ActivationOffload,
    ChunkedLoss,
    InPlaceFusion,
    LeanMixedPrecision,
    MicroBatching,
)
from lightning_vram.callbacks.chunked_loss import ChunkedLoss as Same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Lit(LitTiny):
    """Steps by SGD: Adam makes much of gradients that are zero but for rounding."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(LitManual):
    """The same, in manual optimization."""

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = list(self.net.parameters())
        return [torch.optim.SGD(half, lr=0.1) for half in (halves[::2], halves[1::2])]


class Sharded(Lit):
    """A network that is sharded in layers."""

    def configure_model(self) -> None:
        if not hasattr(self, "is_sharded"):
            self.is_sharded = True
            for layer in (*self.net.blocks, self.net.head, self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def state_dict(self, **options: Any) -> Any:
        return {
            name: getattr(value, "full_tensor", lambda value=value: value)()
            for name, value in super().state_dict(**options).items()
        }


@pytest.fixture
def fit(make_trainer):
    def fit(make: Any = Lit, callbacks: Any = (), *, plugin: Any = None, is_chunked: bool, **options: Any) -> Any:
        pl.seed_everything(0, verbose=False)
        model = make(TinyGPT())
        chunked = [ChunkedLoss(chunk=5)] if is_chunked else []
        plugins = [plugin()] if plugin is not None else []
        make_trainer(callbacks=[*callbacks, *chunked], plugins=plugins, **options).fit(model)
        return [parameter.detach() for parameter in model.state_dict().values()]

    return fit


def assert_near(ones: list[torch.Tensor], others: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_it_is_exported() -> None:
    assert ChunkedLoss is Same


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-5),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 1e-5),
        ({"precision": "bf16-mixed"}, 2e-3),
        ({"plugin": partial(MixedPrecision, "16-mixed", "cpu")}, 2e-3),
        ({"plugin": partial(LeanMixedPrecision, "bf16", recast_in_backward=True)}, 2e-3),
        ({"make": Manual}, 1e-5),
    ],
    ids=["eager", "accumulation and clipping", "bf16", "fp16 with a scaler", "lean", "manual"],
)
def test_training_is_that_of_whole_logits(options, tolerance, fit):
    assert_near(fit(is_chunked=True, **options), fit(is_chunked=False, **options), tolerance)


@pytest.mark.parametrize(
    "parts",
    [
        lambda: [ActivationCheckpointing(), ActivationOffload("64B")],
        lambda: [InPlaceFusion()],
        lambda: [MicroBatching(2)],
    ],
    ids=["checkpointing and offload", "fusion", "micro-batching"],
)
def test_beside_other_parts(parts, fit):
    assert_near(fit(callbacks=parts(), is_chunked=True), fit(callbacks=parts(), is_chunked=False), 1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "strategy"),
    [(Lit, lambda: "ddp_fork"), (Sharded, Forking), (Lit, ForkingOffload)],
    ids=["ddp", "fsdp2", "fsdp_offload"],
)
def test_on_two_ranks(make, strategy, fit):
    options = {"devices": 2, "make": make, "max_epochs": 1, "enable_checkpointing": False}
    plain, found = (fit(strategy=strategy(), is_chunked=is_chunked, **options) for is_chunked in (False, True))
    assert_near(found, plain, 1e-5)


def test_under_fsdp_offload(fit):
    found = fit(strategy=ForkingOffload(), is_chunked=True)
    assert_near(found, fit(is_chunked=False), 1e-5)


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
    fit(Returning, is_chunked=True)


@pytest.mark.parametrize("hook", ["training_step", "on_train_epoch_end", None])
def test_it_is_undone(hook, make_trainer):
    model = LitTiny(TinyGPT())
    before, callback = describe_module(model), ChunkedLoss()
    trainer = make_trainer(callbacks=[callback])
    if hook is None:
        trainer.fit(model)
    else:
        fail_in(model, hook, trainer)
    assert describe_module(model) == before
    make_trainer(callbacks=[callback]).fit(model)  # again


class Summing(Lit):
    """A loss that needs whole logits."""

    def loss(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).cumsum(-1).mean()


def test_a_loss_that_needs_whole_logits_runs_plainly_and_is_told_of_once(fit, caplog):
    found = fit(Summing, is_chunked=True)
    (message,) = [one.getMessage() for one in caplog.records if one.getMessage().startswith("ChunkedLoss")]
    assert message == (
        "ChunkedLoss: cumsum needs the whole logits of net.head, which are computed for it. These run in chunks: "
        "cross_entropy, nll_loss, kl_div, log_softmax with gather, logsumexp and sums over classes."
    )
    assert_near(found, fit(Summing, is_chunked=False), 0)


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
        torch.manual_seed(0)
        self.model, self.batches, self.losses = make(), [make_batch(2) for _ in range(3)], []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.batches, batch_size=None)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen2", "gemma", "phi", "bert", "t5"])
def test_causal_models_of_transformers_unmodified(name, make_trainer, caplog):
    hf_models = pytest.importorskip("support.hf_models")
    make, make_batch = hf_models.MODELS[name]
    found = []
    for callbacks in ([], [ChunkedLoss(chunk=7)]):
        model = LitCausal(make, make_batch)
        make_trainer(callbacks=callbacks, limit_val_batches=0).fit(model)
        found.append((model.losses, [p.detach() for p in model.parameters()]))
    (plain_losses, plain), (losses, weights) = found
    assert losses == pytest.approx(plain_losses, rel=2e-6)
    assert_near(weights, plain, 1e-5)
    assert not any("needs all logits" in one.getMessage() for one in caplog.records)
    assert isinstance(model.model, nn.Module)
