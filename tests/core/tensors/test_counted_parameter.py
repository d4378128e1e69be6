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


def write_directly(parameter):
    with torch.no_grad():
        parameter.mul_(2)


def write_data(parameter):
    parameter.data.mul_(2)


def write_a_view_of_data(parameter):
    parameter.data[:].view(2, 2).mul_(2)


def write_data_kept_from_before(parameter):
    kept = parameter.data
    assert kept is not parameter.data
    kept.mul_(2)


def write_a_list(parameter):
    torch._foreach_mul_([parameter.data], 2.0)


def set_data(parameter):
    parameter.data = parameter.data * 2


WRITES = [write_directly, write_data, write_a_view_of_data, write_data_kept_from_before, write_a_list, set_data]


@pytest.mark.parametrize("write", WRITES)
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
    write_data(parameter)
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
