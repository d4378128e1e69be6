"""Parameters that count what is written to them."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_vram.core.tensors.properties import CountedParameter, count, count_writes


def make() -> nn.Parameter:
    parameter = nn.Parameter(torch.arange(4.0))
    count(parameter)
    return parameter


WRITES = {
    "directly": lambda parameter: torch.no_grad()(parameter.mul_)(2),
    "data": lambda parameter: parameter.data.mul_(2),
    "a view of data": lambda parameter: parameter.data[:].view(2, 2).mul_(2),
    "a list": lambda parameter: torch._foreach_mul_([parameter.data], 2.0),
    "set data": lambda parameter: setattr(parameter, "data", parameter.data * 2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_way_to_write_is_counted(write):
    parameter = make()
    for number in range(3):
        before = count_writes(parameter)
        write(parameter)
        assert count_writes(parameter) > before, number
    assert torch.equal(parameter, torch.arange(4.0) * 8)


def test_reads_are_not_counted():
    parameter = make()
    before = count_writes(parameter)
    (parameter.data * 2 + parameter.data.sum() + parameter).sum().backward()
    assert count_writes(parameter) == before
    assert parameter.data.grad_fn is None
    assert not parameter.data.requires_grad


def test_copies_and_files_are_plain():
    parameter = make()
    parameter.data.mul_(2)
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    for twin in (copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)), torch.load(file)):
        assert type(twin) is nn.Parameter
        assert torch.equal(twin, parameter)
    assert type(parameter) is CountedParameter


def test_a_class_of_somebody_else_is_left_alone():
    class Own(nn.Parameter):
        pass

    parameter = Own(torch.zeros(2))
    count(parameter)
    assert type(parameter) is Own
