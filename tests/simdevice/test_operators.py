"""Operators on the simulated device: equal to the CPU's to the bit, with the shapes and errors of a device."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sim


def given(*shape):
    """The same numbers for both devices."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def written_through_views(x):
    y = x.clone()
    y.view(-1)[2:5].add_(1)
    y.t()[0].mul_(2)
    y.diagonal().zero_()
    y.unfold(0, 2, 1)[0].neg_()
    return y, y.movedim(0, 1).reshape(-1), torch.as_strided(y, (2, 2), (1, 2))


def indexed(x):
    y = x.clone()
    y[y > 0] = 3.0
    y[torch.tensor([0, 1], device=x.device)] += 1
    y.index_add_(0, torch.tensor([0], device=x.device), x[:1])
    return y, x[x > 0], x.nonzero(), x[[0, -1]], x.unique(), x.topk(2), x.sort().indices, x.argmax()


def other_dtypes(x):
    narrow, complex_ = x.bfloat16(), torch.complex(x, x)
    return narrow @ narrow.t(), x.half().softmax(-1), x.to(torch.int8), complex_.conj() * 2, complex_.angle(), x > 0


PROGRAMS = [written_through_views, indexed, other_dtypes]


def flat(result):
    tensors = []
    for item in result if isinstance(result, (tuple, list)) else [result]:
        tensors += [item] if isinstance(item, torch.Tensor) else flat(tuple(item))
    return tensors


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_operators_are_the_cpus_to_the_bit(program):
    expected, found = flat(program(given(4, 5))), flat(program(given(4, 5).to("sim")))
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert other.device == torch.device("sim", 0)
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one, other.cpu())


def test_tensors_of_two_devices_do_not_go_together():
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device.*sim:0 and cpu!"):
        torch.ones(5, device="sim") + torch.ones(5)
    assert (torch.ones(5, device="sim") + torch.tensor(1.0)).sum().item() == 10  # a number is no stranger
    assert torch.ones(5, device="sim")[torch.tensor([1, 2])].shape == (2,)


def test_tied_weights_stay_tied_and_parameters_the_same_objects():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    before = list(net.parameters())
    net.to("sim")
    assert net[1].weight is net[0].weight
    assert all(one is other for one, other in zip(before, net.parameters(), strict=True))
    assert net[0].weight.is_sim
    net(torch.ones(2, 4, device="sim")).sum().backward()
    assert net[0].weight.grad.device.type == "sim"
    net.cpu()
    assert net[1].weight is net[0].weight


def test_tensors_are_pickled_saved_and_loaded():
    tensor, file = given(3, 2).to("sim"), io.BytesIO()
    torch.save({"t": tensor, "view": tensor[1:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["t"].device == tensor.device
    assert loaded["view"].untyped_storage().data_ptr() == loaded["t"].untyped_storage().data_ptr()
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["t"], tensor.cpu())
    assert torch.equal(pickle.loads(pickle.dumps(tensor)).cpu(), tensor.cpu())
    assert copy.deepcopy(tensor).device == tensor.device
    assert "device='sim:0'" in repr(tensor)
