"""``host_state`` and ``MomentsInBF16`` with an accelerator: the same bits, and where moments are."""

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.devices import ACCELERATOR
from support.helpers import assert_equal_weights
from support.host_layers import Layers, exceptions, host_bytes

from lightning_vram import MomentsInBF16
from lightning_vram.core.processes import leave_group
from lightning_vram.private_names.fsdp2 import local_shard
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = [
    pytest.mark.device,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
FORMS = ("bf16", "8bit")


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    leave_group()
    gc.collect()


@pytest.fixture
def fit(make_trainer: Any) -> Any:
    def fit(make: Any, offload: Any = None, *callbacks: pl.Callback, ckpt_path: Any = None, **options: Any) -> Any:
        """Train from scratch; ``offload=None`` is without the strategy."""
        pl.seed_everything(0, verbose=False)
        model = make()
        strategy = "auto" if offload is None else FSDPOffloadStrategy(**{"min_params": 100, **offload})
        defaults = {"accelerator": ACCELERATOR, "devices": 1, "max_epochs": 1, "precision": "bf16-mixed"}
        trainer = make_trainer(strategy=strategy, callbacks=list(callbacks), **{**defaults, **options})
        trainer.fit(model, ckpt_path=ckpt_path)
        model.saved_by = trainer
        return model

    return fit


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("form", FORMS)
def test_how_weights_and_states_are_kept_changes_no_bit(form, options, fit, tmp_path):
    make = partial(Layers, num_batches=8)
    expected = fit(make, {"host_state": form}, **options)
    for more in ({"master": "split"}, {"offload": "optimizer"}, {"master": "split", "nvme_path": tmp_path}):
        assert_equal_weights(fit(make, {"host_state": form, **more}, **options), expected)


class Counted(Layers):
    """Counts the bytes of the host, and looks where moments are."""

    def on_train_batch_end(self, *unused: Any) -> None:
        if hasattr(self.trainer.strategy, "_finish_steps"):
            self.host_bytes.append(host_bytes(self) - exceptions(self))
        states = self.trainer.optimizers[0].state.values()
        moments = [local_shard(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]
        self.kinds = {(value.dtype, value.device.type) for value in moments}


@pytest.mark.parametrize(
    ("form", "master", "most"),
    [("bf16", "split", 10), ("8bit", "split", 8.3), ("4bit", "split", 7.3), ("bf16", "fp32", 14)],
)
def test_a_weight_takes_as_many_bytes_of_the_host(form, master, most, fit):
    model = fit(partial(Counted, num_batches=6), {"host_state": form, "master": master})
    num_weights = sum(p.numel() for p in model.parameters())
    assert model.host_bytes[-1] <= most * num_weights
    assert "bit" in form or model.host_bytes[-1] == most * num_weights
    assert model.kinds == {(torch.bfloat16 if form == "bf16" else torch.float32, "cpu")}


@pytest.mark.parametrize("offload", [None, {"offload": "none"}])
def test_moments_are_bf16_on_the_device(offload, fit):
    model = fit(partial(Counted, num_batches=4), offload, MomentsInBF16())
    assert {dtype for dtype, _ in model.kinds} == {torch.bfloat16}
    assert all(device != "cpu" for _, device in model.kinds)


def test_a_resumed_run_ends_at_the_same_bits(fit, tmp_path):
    make = partial(Layers, num_batches=6)
    fit(make, None, MomentsInBF16()).saved_by.save_checkpoint(tmp_path / "last.ckpt")
    resumed = fit(make, None, MomentsInBF16(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert_equal_weights(resumed, fit(make, None, MomentsInBF16(), max_epochs=2))
