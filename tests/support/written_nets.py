"""Models that write to their weights by hand, as code of others does."""

import copy

import torch
import torch.nn.functional as F
from support.offload_nets import Fused, adamw
from torch import nn


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


class Manual(Fused):
    """Steps by itself, and notes losses."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.losses = []

    def note(self, batch):
        self.losses.append(self.loss(batch).item())


class ClippedByOptimizer(Manual):
    """Clips what its optimizer has, and computes with it in the same step."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.1, 0.1)
        self.note(batch)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data * 0.9
        self.note(batch)


class Sharpness(Manual):
    """Goes up, and from there takes the gradient to go down with (SAM)."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            moves = [0.05 * p.grad for p in parameters]
            torch._foreach_add_(parameters, moves)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        self.note(batch)


class OwnSGD(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)


class DecayedByHand(Manual):
    """Writes to its weights between the backward and the step of an optimizer that nobody has read."""

    def configure_optimizers(self):
        return OwnSGD(self.parameters())

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for parameter in self.parameters():
            parameter.data.mul_(0.9)
        optimizer.step()
        self.note(batch)
