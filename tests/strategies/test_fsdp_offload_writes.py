"""What users' code writes to weights by hand, under ``fsdp_offload``: averages, clips, scales them."""

import lightning.pytorch as pl
import pytest
from helpers import ForkingOffload, assert_equal_weights, describe_module
from strategies.offload_nets import MODES, leave_group
from strategies.written_nets import WAYS, Averaged, Clipped, Normalized, Renormed

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

    return check


@pytest.mark.parametrize("where", ["step", "end of the batch", "before zero_grad"])
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_is_the_average_of_its_student(where, way, check):
    modes = ("params", "all in the root", "none") if way == "data =" else ("params", "all in the root")
    check(lambda: Averaged(where, WAYS[way]), modes)


@pytest.mark.parametrize("way", ["data =", "data.mul_"])
def test_it_is_in_mixed_precision_too(way, check):
    check(lambda: Averaged("step", WAYS[way]), ("params", "all in the root", "optimizer"), precision="bf16-mixed")


@pytest.mark.parametrize("make", [Clipped, Normalized, Renormed])
def test_weights_that_are_changed_by_hand_are_those_of_a_plain_run(make, check):
    check(make, ("params", "all in the root"))
