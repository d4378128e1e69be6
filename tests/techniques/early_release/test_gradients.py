"""Gradients that are kept for nothing: their bytes, when they are zeroed, and those without an optimizer."""

import torch
from torch import nn

from lightning_vram.techniques.early_release import gradient_bytes, unstepped_gradients, zero_early


def test_bytes_are_those_of_storages_each_counted_once():
    bucket = torch.zeros(100)
    one, other, third = (nn.Parameter(torch.zeros(10)) for _ in range(3))
    assert gradient_bytes([one, other]) == 0
    one.grad, other.grad = bucket[:10], bucket[10:20]  # as DDP has it
    third.grad = torch.zeros(10)
    assert gradient_bytes([one, other, third]) == 400 + 40


def test_zeroing_comes_at_once_and_again_only_for_what_has_come_since():
    parameter, num_calls = nn.Parameter(torch.zeros(2)), 0

    def zero() -> None:
        nonlocal num_calls
        num_calls += 1
        parameter.grad = None

    parameter.grad = torch.ones(2)
    again = zero_early(zero, [parameter])
    assert (parameter.grad, num_calls) == (None, 1)
    again()
    assert num_calls == 1
    parameter.grad = torch.ones(2)
    again()
    assert (parameter.grad, num_calls) == (None, 2)


def test_parameters_without_an_optimizer():
    net = nn.ModuleDict({"teacher": nn.Linear(2, 2), "student": nn.Linear(2, 2)})
    optimizers = [torch.optim.SGD([net.student.weight]), torch.optim.SGD([net.student.bias])]
    assert unstepped_gradients(net, optimizers) == {}
    (net.student(torch.ones(2)) - net.teacher(torch.ones(2))).sum().backward()
    assert list(unstepped_gradients(net, optimizers)) == ["teacher.weight", "teacher.bias"]
