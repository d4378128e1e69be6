"""Gradients after a backward that broke off are those from before it, in the same tensors."""

import pytest
import torch
from support.devices import DEVICE, refuse_waits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
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


def test_gradients_that_are_views_of_a_bucket_stay_views():
    model = nn.Linear(3, 2)
    bucket = torch.zeros(8)
    model.weight.grad, model.bias.grad = bucket[:6].view(2, 3), bucket[6:]
    backward(model)
    value = bucket.clone()
    state = GradientState(model.parameters())
    backward(model, 2.0)
    assert not torch.equal(bucket, value)
    state.restore()
    assert torch.equal(bucket, value)


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


def test_a_parameter_named_twice_is_restored_once():
    model = nn.Linear(3, 2)
    backward(model)
    state = GradientState([model.weight, model.weight, model.bias])
    value = model.bias.grad.clone()
    backward(model)
    state.restore()
    assert torch.equal(model.bias.grad, value)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.usefixtures("one_process")
def test_sharded_gradients_come_back():
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)]))
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

    def __init__(self, error) -> None:
        self.error = error
        self.num_clones = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.clone:
            self.num_clones += 1
            if self.num_clones == 2:
                raise self.error
        return func(*args, **(kwargs or {}))


def test_without_room_on_the_device_copies_are_made_on_the_host():
    model = nn.Linear(3, 2)
    backward(model)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with Full(torch.OutOfMemoryError("CUDA out of memory.")):
        state = GradientState(model.parameters())
    backward(model)
    state.restore()
    assert all(torch.equal(p.grad, value) for p, value in zip(model.parameters(), before, strict=True))


def test_other_errors_are_not_hidden():
    model = nn.Linear(3, 2)
    backward(model)
    with Full(ValueError("broken")), pytest.raises(ValueError, match="broken"):
        GradientState(model.parameters())


@pytest.mark.device
def test_on_a_gpu_nobody_waits_for_the_device():
    model = nn.Linear(3, 2, device=DEVICE)
    inputs = torch.ones(4, 3, device=DEVICE)
    model(inputs).sum().backward()
    value = model.weight.grad.clone()
    with refuse_waits():
        state = GradientState(model.parameters())
        model(inputs).sum().backward()
        state.restore()
    assert torch.equal(model.weight.grad, value)
