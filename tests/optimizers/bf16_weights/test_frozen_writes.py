"""Frozen parameters that are moved by hand."""

import copy
import re

import pytest
import torch
from support.lean_nets import make_net, take_steps
from torch import nn, optim

from lightning_vram.optimizers.bf16_weights import SCHEMES, LeanParameters


def student_and_teacher(scheme, *, has_names=True):
    net = nn.ModuleDict({"student": make_net(), "teacher": make_net().requires_grad_(requires_grad=False)})
    lean = LeanParameters(net.parameters(), scheme, dict(net.named_parameters()) if has_names else None)
    optimizer = optim.SGD(net.parameters(), lr=0.01)
    lean.attach([optimizer])
    return net, lean, optimizer


@torch.no_grad()
def average(net):
    for target, source in zip(net["teacher"].parameters(), net["student"].parameters(), strict=True):
        target.mul_(0.999).add_(source, alpha=0.001)


def refusal(what):
    message = (
        f"The frozen parameter {what} is written at almost every step, and bfloat16 loses small changes: name its "
        "module in fp32_modules=[...]."
    )
    return pytest.raises(RuntimeError, match=f"^{re.escape(message)}$")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_averages_are_refused_at_the_fourth_step(scheme):
    net, lean, optimizer = student_and_teacher(scheme)
    for seed in range(3):
        take_steps(net, optimizer, seed)
        average(net)
    before = lean.full_state(net.state_dict())
    with refusal("teacher.0.weight"):
        take_steps(net, optimizer, 3)
    after = lean.full_state(net.state_dict())
    assert all(torch.equal(before[name], after[name]) for name in before)
    lean.restore()  # is not held up
    assert {type(parameter) for parameter in net.parameters()} == {nn.Parameter}
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


def test_a_parameter_without_a_name_is_named_by_its_shape():
    net, _, optimizer = student_and_teacher("bf16+split", has_names=False)
    with refusal("of shape (17, 33)"):
        for seed in range(4):
            take_steps(net, optimizer, seed)
            average(net)


def test_loading_and_copying_once_in_a_while_is_allowed():
    net, lean, optimizer = student_and_teacher("bf16+split")
    state = copy.deepcopy(net["teacher"].state_dict())
    for _ in range(4):  # before the first step
        net["teacher"].load_state_dict(state)
    for seed in range(24):
        if seed % 4 == 0:
            net["teacher"].load_state_dict(net["student"].state_dict())
        take_steps(net, optimizer, seed)
    lean.take({net["teacher"][0].weight: state["0.weight"]})
    take_steps(net, optimizer, 24)
