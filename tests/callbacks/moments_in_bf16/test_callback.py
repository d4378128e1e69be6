"""``MomentsInBF16``: 4 bytes of state for each weight, resumed to the bit, undone after the fit."""

from functools import partial
from typing import Any

import pytest
import torch
from support.helpers import ForkingOffload, assert_equal_weights
from support.host_layers import Layers, Loaded
from support.offload_nets import leave_group
from torch import Tensor, nn

from lightning_vram import MomentsInBF16
from lightning_vram.private_names.fsdp2 import local_shard

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Looking(Layers):
    def on_train_batch_end(self, *unused: Any) -> None:
        if hasattr(self.trainer.strategy, "_finish_steps"):
            self.trainer.strategy._finish_steps()
        states = self.trainer.optimizers[0].state.values()
        values = [local_shard(value) for state in states for value in state.values()]
        self.dtypes = {value.dtype for value in values if value.dim()}
        self.host_bytes.append(sum(value.nbytes for value in values if value.dim()))


def num_weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_moments_are_bf16_and_training_is_close(fit):  # other optimizers: optimizer_table.txt
    make = partial(Looking, num_batches=20)
    narrow, plain = fit(make, MomentsInBF16()), fit(make)
    assert narrow.dtypes == {torch.bfloat16}
    assert narrow.host_bytes == [2 * 2 * num_weights(narrow)] * 20
    assert plain.host_bytes == [4 * 2 * num_weights(plain)] * 20
    ours, theirs = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (narrow, plain))
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_checkpoints_are_plain_and_load_with_and_without(first, second, fit, tmp_path):
    make, (ours, theirs) = partial(Loaded, num_batches=4), ([MomentsInBF16()] if one else [] for one in (first, second))
    fit(make, *ours).trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"].values()
    loaded = fit(make, *theirs, ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    for moment, state in zip(loaded.moments, saved, strict=True):
        assert type(state["exp_avg"]) is Tensor
        assert state["exp_avg"].dtype == (torch.bfloat16 if first else torch.float32)
        assert moment.dtype == (torch.bfloat16 if second else torch.float32)
        assert torch.equal(moment, state["exp_avg"].to(moment.dtype))


@pytest.mark.distributed
@pytest.mark.parametrize("offload", [{"device_bytes": 0.5}, {"host_state": "bf16"}])
def test_under_fsdp_offload_moments_are_bf16_wherever_they_are(offload, fit):
    make, options = partial(Looking, num_batches=4), {"precision": "bf16-mixed"}
    model = fit(make, MomentsInBF16(), strategy=ForkingOffload(**offload), **options)
    assert model.dtypes == {torch.bfloat16}
    assert model.host_bytes[-1] == 4 * num_weights(model)
    if "host_state" in offload:
        assert_equal_weights(model, fit(make, strategy=ForkingOffload(**offload), **options))
    leave_group()


def test_a_resumed_run_ends_at_the_same_bits(fit, tmp_path):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
    train = partial(fit, partial(Layers, num_batches=6), MomentsInBF16(), **options)
    train().trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert_equal_weights(train(ckpt_path=tmp_path / "last.ckpt", max_epochs=2), train(max_epochs=2))
