"""What users' code writes to weights by hand, under ``fsdp_offload``: averages, clips, scales them."""

import copy

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from helpers import ForkingOffload, assert_equal_weights, describe_module
from strategies.offload_nets import MODES, Fused, adamw, leave_group
from torch import nn

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


def set_data(teacher, student):
    teacher.data = teacher.data * 0.9 + student.data * 0.1


def write_data(teacher, student):
    teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


@torch.no_grad()
def lerp(teacher, student):
    teacher.lerp_(student, 0.1)


@torch.no_grad()
def write_list(teachers, students):
    torch._foreach_mul_(teachers, 0.9)
    torch._foreach_add_(teachers, students, alpha=0.1)


def one_by_one(move):
    def move_all(teachers, students):
        for pair in zip(teachers, students, strict=True):
            move(*pair)

    return move_all


WAYS = {
    "data =": one_by_one(set_data),
    "data.mul_": one_by_one(write_data),
    "lerp_": one_by_one(lerp),
    "foreach": write_list,
}


class Averaged(Fused):
    """A student, and the average of its weights, as BYOL and MoCo have it."""

    def __init__(self, where, way):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(requires_grad=False)
        self.where, self.way = where, way

    def average(self, where):
        if where == self.where:
            self.way(list(self.teacher.parameters()), list(self.net.parameters()))

    def training_step(self, batch, batch_idx):
        self.average("step")
        inputs, targets = batch
        logits = self.net(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten()) + F.mse_loss(logits, self.teacher(inputs))

    def on_train_batch_end(self, *unused):
        self.average("end of the batch")

    def on_before_zero_grad(self, *unused):
        self.average("before zero_grad")


@pytest.mark.parametrize("where", ["step", "end of the batch", "before zero_grad"])
@pytest.mark.parametrize("way", WAYS)
def test_a_teacher_is_the_average_of_its_student(where, way, check):
    modes = ("params", "all in the root", "none") if way == "data =" else ("params", "all in the root")
    check(lambda: Averaged(where, WAYS[way]), modes)


@pytest.mark.parametrize("way", ["data =", "data.mul_"])
def test_it_is_in_mixed_precision_too(way, check):
    check(lambda: Averaged("step", WAYS[way]), ("params", "all in the root", "optimizer"), precision="bf16-mixed")


class Clipped(Fused):
    """Clips its weights after each step, as WGAN does."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


class Normalized(Fused):
    """Normalises its head before each forward, as SwAV does its prototypes."""

    def training_step(self, batch, batch_idx):
        weight = self.net.head.weight.data.clone()
        self.net.head.weight.data.copy_(F.normalize(weight, dim=1))
        return super().training_step(batch, batch_idx)


class Renormed(Fused):
    def __init__(self):
        super().__init__()
        self.net.embed = nn.Embedding(*self.net.embed.weight.shape, max_norm=0.1)
        self.net.head.weight = nn.Parameter(self.net.head.weight.detach().clone())

    def configure_optimizers(self):
        return adamw(self.parameters())


@pytest.mark.parametrize("make", [Clipped, Normalized, Renormed])
def test_weights_that_are_changed_by_hand_are_those_of_a_plain_run(make, check):
    check(make, ("params", "all in the root"))
