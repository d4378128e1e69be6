"""Gradients are multiplied once each, however they are stored."""

import pytest
import torch
from support.devices import DEVICE
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_vram.core.gradients import scale_gradients

FACTORS = [1.5, torch.tensor(1.5, dtype=torch.float64)]


def parameter_with(gradient):
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


@pytest.mark.parametrize("factor", FACTORS, ids=["number", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_the_memory_of_the_gradient_is_multiplied(dtype, factor):
    gradient = torch.tensor([2.0, -4.0]).to(dtype)
    parameter = parameter_with(gradient)
    scale_gradients([parameter, nn.Parameter(torch.zeros(2))], factor)
    assert parameter.grad is gradient
    assert gradient.dtype == dtype
    assert torch.equal(gradient, torch.tensor([3.0, -6.0]).to(dtype))


def test_a_parameter_that_is_given_twice_is_scaled_once():
    parameters = [parameter_with(torch.ones(2)), parameter_with(torch.ones(2, dtype=torch.float64))]
    scale_gradients([*parameters, *parameters], 2)
    assert all(parameter.grad.tolist() == [2, 2] for parameter in parameters)


@pytest.mark.parametrize("factor", FACTORS, ids=["number", "tensor"])
def test_sparse_gradients_stay_sparse(factor):
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    scale_gradients(embedding.parameters(), factor)
    assert embedding.weight.grad.is_sparse
    assert embedding.weight.grad.to_dense().tolist() == [[0, 0], [3, 3], [0, 0], [1.5, 1.5]]


@pytest.mark.parametrize("factor", FACTORS, ids=["number", "tensor"])
def test_a_shard_is_multiplied_in_its_place(mesh, factor):
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
    parameter.grad = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    scale_gradients([parameter], factor)
    assert parameter.grad.full_tensor().tolist() == [1.5] * 4


@pytest.mark.device
def test_gradients_on_the_host_and_on_the_device_are_scaled_together():
    parameters = [parameter_with(torch.ones(2)), nn.Parameter(torch.zeros(2, device=DEVICE))]
    parameters[1].grad = torch.ones(2, device=DEVICE)
    scale_gradients(parameters, torch.tensor(1.5, dtype=torch.float64, device=DEVICE))
    assert all(parameter.grad.tolist() == [1.5, 1.5] for parameter in parameters)
