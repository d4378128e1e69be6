"""Gradients are multiplied once each, however they are stored, and clipped by norms over ranks."""

import pytest
import torch
import torch.distributed as dist
from support.devices import DEVICE
from support.sharded_nets import on_ranks, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_vram.core.gradients import (
    apply_clip_factor,
    clip_factor,
    clip_gradient_norm,
    clip_sharded_values,
    scale_gradients,
    sharded_norm,
)

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


pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


def parameters(*dtypes):
    torch.manual_seed(0)
    made = [torch.nn.Parameter(torch.randn(40, 50).to(dtype)) for dtype in dtypes]
    for parameter in made:
        parameter.grad = torch.randn(40, 50).to(parameter.dtype)
    return made


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.complex64), (torch.float64, torch.float32)])
def test_wide_gradients_are_clipped_as_by_torch(dtypes, max_norm):
    ours, theirs = parameters(*dtypes), parameters(*dtypes)
    norm = clip_gradient_norm(ours, max_norm)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, max_norm), check_dtype=False)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_clipped_by_a_norm_in_fp32(dtype):
    ours = parameters(dtype, torch.float32)
    exact = torch.cat([parameter.grad.double().flatten() for parameter in ours])
    norm = clip_gradient_norm(ours, 10.0)
    assert norm.item() == pytest.approx(exact.norm().item(), rel=1e-6)
    expected = (exact * 10.0 / (exact.norm() + 1e-6)).split(2000)
    rtol = 0.51 * torch.finfo(dtype).eps  # half a unit in the last place
    torch.testing.assert_close(ours[0].grad.flatten().double(), expected[0], rtol=rtol, atol=1e-7)
    torch.testing.assert_close(ours[1].grad.flatten(), expected[1].float())


def test_without_gradients_the_norm_is_zero():
    assert clip_gradient_norm([nn.Parameter(torch.ones(2))], 1.0) == 0
    assert sharded_norm([nn.Parameter(torch.ones(3))]) == 0


SHAPES = [(5, 3), (4,), (1, 2)]


def plain_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in [*SHAPES, ()]]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return [*parameters, nn.Parameter(torch.zeros(3))]  # the last has none


def distribute(parameters: list[nn.Parameter], mesh: DeviceMesh) -> list[nn.Parameter]:
    """As FSDP2 has them: scalars are whole."""
    places = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    result = []
    for parameter in parameters:
        is_scalar = not parameter.dim()
        spread = parameter.detach() if is_scalar else distribute_tensor(parameter.detach(), mesh, places)
        result.append(nn.Parameter(spread))
        if parameter.grad is not None:
            gradient = parameter.grad.clone()
            result[-1].grad = gradient if is_scalar else distribute_tensor(gradient, mesh, places)
    return result


def test_on_one_rank_the_norm_has_the_bits_of_pytorch(mesh):
    expected = clip_grad_norm_(plain_parameters(), 1.0)
    assert torch.equal(sharded_norm(distribute(plain_parameters(), mesh)), expected)
    assert torch.equal(sharded_norm(plain_parameters()), expected)


@pytest.mark.parametrize(("max_norm", "first"), [(0.5, 1.0), (100.0, 1.0), (1.0, torch.inf), (1.0, torch.nan)])
def test_scaled_by_the_factor_gradients_have_the_bits_of_pytorch(max_norm, first):
    parameters, expected = plain_parameters(), plain_parameters()
    for some in (parameters, expected):
        some[0].grad[0, 0] = first
    factor = clip_factor(sharded_norm(parameters), max_norm)
    assert not factor > 1
    apply_clip_factor([p.grad for p in parameters if p.grad is not None], factor)
    clip_grad_norm_(expected, max_norm)
    for one, other in zip(parameters[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)
    apply_clip_factor([], factor)


def norms_of(mesh: DeviceMesh) -> list[Tensor]:
    expected = clip_grad_norm_(plain_parameters(), 1e9)
    norm = sharded_norm(distribute(plain_parameters(), mesh))
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    seen = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(seen, norm)
    assert all(torch.equal(one, norm) for one in seen)
    return seen


def sharded_over_all() -> None:
    norms_of(init_device_mesh("cpu", (dist.get_world_size(),)))


def sharded_over_pairs() -> None:
    size = dist.get_world_size()
    norms_of(init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard")))


def clip_on_all() -> None:
    parameters = distribute(plain_parameters(), init_device_mesh("cpu", (dist.get_world_size(),)))
    before, expected = [p.grad for p in parameters], plain_parameters()
    clip_sharded_values(parameters, 0.5)
    clip_grad_value_(expected, 0.5)
    for one, other, old in zip(parameters, expected, before, strict=True):
        assert one.grad is old
        assert other.grad is None or torch.equal(whole(one.grad), other.grad)


def test_four_ranks_have_the_norm_of_the_whole_and_clip_their_parts(tmp_path):
    on_ranks(tmp_path, sharded_over_all, sharded_over_pairs, clip_on_all, num_ranks=4)
