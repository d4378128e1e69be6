"""Lightning's averages of weights that are lean are those of a plain run: made of the exact weights."""

import re
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import assert_equal_weights
from support.lean_nets import EXACT
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_vram import LeanMixedPrecision
from lightning_vram.core.patching import MethodPatch
from lightning_vram.optimizers import bf16_weights
from lightning_vram.optimizers.bf16_weights import SCHEMES
from lightning_vram.private_names.lightning import average_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning, about folders that exist
AVERAGES: dict[str, Any] = {
    "EMA": partial(EMAWeightAveraging, decay=0.9),
    "EMA, some steps": partial(EMAWeightAveraging, decay=0.9, update_every_n_steps=2, use_buffers=False),
    "EMA of many at once": partial(WeightAveraging, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False),
}
EMA = AVERAGES["EMA"]


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(bf16_weights, "CHUNK_ELEMENTS", 300)


class Net(pl.LightningModule):
    """Lean weights, frozen ones, a norm that stays float32, buffers. Notes what validation sees."""

    lr = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(7, 9).requires_grad_(requires_grad=False)
        self.net = nn.Sequential(nn.Linear(9, 33), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 17), nn.Linear(17, 5))
        self.seen: list[float] = []

    def loss(self, batch: Any) -> Any:
        return self.net(self.frozen(batch)).float().square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(24, 7, generator=torch.Generator().manual_seed(0)), 4)

    val_dataloader = train_dataloader


@pytest.fixture
def fit(make_trainer):
    def fit(scheme: str | None, average: Any = EMA, make: Any = Net, *, ckpt_path: Any = None, **options: Any) -> Any:
        torch.manual_seed(0)
        model, callback = make(), average()
        chosen = {"precision": "bf16-mixed"} if scheme is None else {"plugins": [lean(scheme)]}
        given = {"max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1, **chosen, **options}
        trainer = make_trainer(**{**given, "callbacks": [callback, *options.get("callbacks", [])]})
        trainer.fit(model, ckpt_path=ckpt_path)
        vars(model).update(average=average_of(callback), saved_by=trainer, callback=callback)
        return model

    return fit


def lean(scheme: str) -> LeanMixedPrecision:
    return LeanMixedPrecision("bf16", parameters=scheme)


def check(ours: Any, plain: Any) -> None:
    assert_equal_weights(ours.average, plain.average)
    assert_equal_weights(ours, plain)
    assert ours.seen == plain.seen


def check_undone(model: Any) -> None:
    owners = (model.callback, model.average, model, model.saved_by.strategy)
    assert not any(isinstance(value, MethodPatch) for owner in owners for value in vars(owner).values())
    assert {p.dtype for one in (model, model.average.module) for p in one.parameters()} == {torch.float32}


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("scheme", EXACT)
def test_averages_of_exact_schemes_are_those_of_a_plain_run(scheme, average, fit):
    ours = fit(scheme, average)
    check(ours, fit(None, average))
    check_undone(ours)


class Following(Callback):
    """Averages by hand what a checkpoint would hold, and looks what a validation leaves of what a step begins with."""

    average: Any = None

    def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
        now = {key: value.clone() for key, value in trainer.strategy.lightning_module_state_dict().items()}
        self.average = self.average or now
        for key, value in self.average.items():
            if value.is_floating_point():
                value.lerp_(now[key], 0.1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.before = bits_of(pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        assert all(map(torch.equal, bits_of(pl_module), self.before))


def bits_of(model: Any) -> list[torch.Tensor]:
    rests = model.trainer.precision_plugin._run.lean.rests()
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *rests)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_whatever_the_scheme_exact_weights_are_averaged_and_given_to_the_module(scheme, fit):
    following = Following()
    ours = fit(scheme, partial(WeightAveraging, multi_avg_fn=get_ema_multi_avg_fn(0.9)), callbacks=[following])
    named = dict(ours.average.module.named_parameters())
    assert all(torch.equal(value, following.average[name]) for name, value in named.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in named.values())
    assert_equal_weights(ours, ours.average.module)  # which lost nothing to bfloat16
    check_undone(ours)


def test_frozen_weights_that_change_places_in_every_step_are_not_written_by_hand(fit):
    options = {"val_check_interval": 1, "max_epochs": 3}
    check(fit("bf16+split", **options), fit(None, **options))


class Saving(Net):
    """Writes a checkpoint after its first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/first.ckpt", weights_only=False)


@pytest.mark.parametrize(
    ("first", "second"),
    [("bf16+master", "bf16+split"), ("bf16+split", None), (None, "bf16+split")]
    + [(scheme, scheme) for scheme in ("bf16+kahan", "bf16+stochastic")],
)
def test_a_run_goes_on_from_its_checkpoint(first, second, fit, tmp_path):
    unbroken = fit(first, make=Saving, num_sanity_val_steps=0)
    resumed = fit(second, ckpt_path=tmp_path / "first.ckpt", num_sanity_val_steps=0)
    assert_equal_weights(resumed.average, unbroken.average)
    assert_equal_weights(resumed, unbroken)
    assert resumed.seen == unbroken.seen[1:]


class Replica(Net):
    """Leaves in a file what a rank has at the end."""

    def on_train_end(self) -> None:
        states = self.trainer.strategy.lightning_module_state_dict(), average_of(self.trainer.callbacks[0]).state_dict()
        torch.save(states, f"{self.trainer.default_root_dir}/{self.global_rank}.pt")


@pytest.mark.distributed
def test_replicas_have_the_same_average(fit, tmp_path):
    fit("bf16+stochastic", make=Replica, strategy="ddp_fork", devices=2, max_epochs=1)
    (one, average), (other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for key, value in one.items():
        assert torch.equal(value, other[key])
        assert torch.equal(value, average[f"module.{key}"])


class Growing(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.adapter = nn.Linear(3, 3)


def test_a_module_that_has_grown_since_it_was_copied_is_refused(fit):
    message = (
        "EMAWeightAveraging copied the module when it had 10 parameters; now it has 12. Put callbacks that "
        "change the module before it in Trainer(callbacks=...)."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        fit("bf16+split", callbacks=[Growing()])
