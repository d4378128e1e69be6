"""Gradients after a backward that broke off are those from before it, in the same tensors."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_vram.callbacks.micro_batching.step_state import GradientState


def backward(model, scale=1.0):
    model(torch.full((2, 3), scale)).square().sum().backward()


def test_no_gradient_stays_none():
    model = nn.Linear(3, 2)
    state = GradientState(model.parameters())
    for _ in range(2):
        backward(model)
        state.restore()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_an_accumulation_window_come_back_into_the_same_tensors():
    model = nn.Linear(3, 2)
    backward(model)
    before = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    state = GradientState(model.parameters())
    for scale in (2.0, 3.0):
        backward(model, scale)
        model.zero_grad(set_to_none=scale == 3.0)
        state.restore()
        for parameter, (gradient, value) in zip(model.parameters(), before, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(gradient, value)


def test_sparse_gradients_come_back():
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1, 3])).sum().backward()
    value = model.weight.grad.to_dense().clone()
    state = GradientState(model.parameters())
    for row in (0, 3):
        model(torch.tensor([row])).sum().backward()
        assert not torch.equal(model.weight.grad.to_dense(), value)
        state.restore()
        assert torch.equal(model.weight.grad.to_dense(), value)


@pytest.mark.distributed
def test_sharded_gradients_come_back(mesh):
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    weight.square().sum().backward()
    gradient = weight.grad
    assert isinstance(gradient, DTensor)
    state = GradientState([weight])
    weight.square().sum().backward()
    assert gradient.full_tensor()[0, 0] == 4
    state.restore()
    assert weight.grad is gradient
    assert torch.equal(gradient.full_tensor(), torch.full((4, 2), 2.0))


class Full(torch.overrides.TorchFunctionMode):
    """A device without room for the second clone."""

    num_clones = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.clone:
            self.num_clones += 1
            if self.num_clones == 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


def test_without_room_on_the_device_copies_are_made_on_the_host():
    model = nn.Linear(3, 2)
    backward(model)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with Full():
        state = GradientState(model.parameters())
    backward(model)
    state.restore()
    assert all(torch.equal(p.grad, value) for p, value in zip(model.parameters(), before, strict=True))
