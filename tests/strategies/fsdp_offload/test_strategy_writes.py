"""What users' code writes to weights by hand, under ``fsdp_offload``: averages, clips, scales them."""

import io

import pytest
import torch
from support.helpers import ForkingOffload
from support.offload_nets import Fused
from support.written_nets import (
    WAYS,
    Averaged,
    Clipped,
    ClippedByOptimizer,
    DecayedByHand,
    Normalized,
    Renormed,
    Sharpness,
)
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_vram.private_names.fsdp2 import calls_derived_dispatch

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("where", ["step", "end of the batch", "before zero_grad"])
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_is_the_average_of_its_student(where, way, same_in_modes):
    precision = "32-true" if where == "end of the batch" else "bf16-mixed"
    modes = ("params", "none" if way == "data =" else "all in the root")
    same_in_modes(lambda: Averaged(where, WAYS[way]), modes, precision=precision)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("make", [Clipped, Normalized, Renormed])
def test_weights_that_are_changed_by_hand_are_those_of_a_plain_run(make, same_in_modes):
    same_in_modes(make, ("params", "all in the root"))


@pytest.mark.slow_except("params-Sharpness", "optimizer-ClippedByOptimizer", "none-DecayedByHand")
@pytest.mark.parametrize("make", [ClippedByOptimizer, Sharpness, DecayedByHand])
@pytest.mark.parametrize("mode", ["params", "all in the root", "optimizer", "none"])
def test_what_is_changed_by_way_of_the_optimizer_counts_in_the_step(make, mode, same_in_modes):
    if make is Sharpness and not calls_derived_dispatch:
        pytest.skip("writes to shards beside what is gathered are not seen before torch 2.13")
    same_in_modes(make, (mode,))


def test_a_parameter_is_saved_as_it_is(make_trainer):
    class Saving(Fused):
        def training_step(self, batch, batch_idx):
            file = io.BytesIO()
            torch.save([self.net.head.weight, self.trainer.optimizers[0].param_groups[0]["params"][0]], file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            assert [type(one) for one in loaded] == [nn.Parameter, DTensor]
            assert not [key for one in loaded for key in vars(one) if key.startswith("_lightning_vram")]
            return super().training_step(batch, batch_idx)

    make_trainer(strategy=ForkingOffload(), precision="bf16-mixed", limit_val_batches=0).fit(Saving())
