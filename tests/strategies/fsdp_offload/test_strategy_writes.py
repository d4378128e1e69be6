"""What users' code writes to weights by hand, under ``fsdp_offload``: averages, clips, scales them."""

import io

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload, assert_equal_weights, describe_module
from support.offload_nets import MODES, Fused, FusedCNN, leave_group
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


@pytest.fixture(autouse=True)
def _alone():
    yield
    leave_group()


@pytest.fixture
def check(make_trainer):
    def check(make, modes, **arguments):
        """Train plainly and sharded: every weight is the same, and no trace is left on the module."""
        fitted = []
        for mode in (None, *modes):
            pl.seed_everything(0, verbose=False)
            model = make()
            before = describe_module(model)
            strategy = "auto" if mode is None else ForkingOffload(**MODES[mode])
            make_trainer(strategy=strategy, max_epochs=1, limit_val_batches=0, **arguments).fit(model)
            assert describe_module(model) == before
            fitted.append(model)
        for ours in fitted[1:]:
            assert_equal_weights(ours, fitted[0])
            assert getattr(ours, "losses", []) == getattr(fitted[0], "losses", [])

    return check


@pytest.mark.slow_except("lerp_-end of the batch")
@pytest.mark.parametrize("where", ["step", "end of the batch", "before zero_grad"])
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_is_the_average_of_its_student(where, way, check):
    modes = ("params", "all in the root", "none") if way == "data =" else ("params", "all in the root")
    check(lambda: Averaged(where, WAYS[way]), modes)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data =", "data.mul_", "foreach"])
def test_it_is_in_mixed_precision_too(way, check):
    check(lambda: Averaged("step", WAYS[way]), ("params", "all in the root", "optimizer"), precision="bf16-mixed")


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("make", [Clipped, Normalized, Renormed])
def test_weights_that_are_changed_by_hand_are_those_of_a_plain_run(make, check):
    check(make, ("params", "all in the root"))


@pytest.mark.slow_except("params-Sharpness", "optimizer-ClippedByOptimizer", "none-DecayedByHand")
@pytest.mark.parametrize("make", [ClippedByOptimizer, Sharpness, DecayedByHand])
@pytest.mark.parametrize("mode", ["params", "all in the root", "optimizer", "none"])
def test_what_is_changed_by_way_of_the_optimizer_counts_in_the_step(make, mode, check):
    if make is Sharpness and not calls_derived_dispatch:
        pytest.skip("writes to shards beside what is gathered are not seen before torch 2.13")
    check(make, (mode,))


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


class Tagged(torch.Tensor):
    """A class of somebody else, which results keep."""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_inputs_of_another_class_keep_it(precision, make_trainer):
    class OnTagged(FusedCNN):
        def loss(self, batch):
            assert type(self.net[0](batch[0].as_subclass(Tagged))) is Tagged
            return super().loss(batch)

    make_trainer(strategy=ForkingOffload(), precision=precision, limit_val_batches=0).fit(OnTagged())
