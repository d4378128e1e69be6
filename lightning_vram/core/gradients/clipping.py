"""Clip gradients: some of them in 16 bit, by a norm in float32; those of sharded parameters, on their local parts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from lightning_vram.private_names.fsdp2.sharded_tensors import local_part
from lightning_vram.private_names.torch.operators import multiply_each, norm_each, order_by_group

_HALF_DTYPES = (torch.bfloat16, torch.float16)


def clip_gradient_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients to a common 2-norm of at most ``max_norm``; return the norm before, in float32 or float64.

    ``torch.nn.utils.clip_grad_norm_`` computes norm and factor in the dtype of the gradients: in bfloat16 with an error
    of up to half a percent.
    """
    gradients = _gradients_of(parameters)
    if not gradients:
        return torch.tensor(0.0)
    device = gradients[0].device
    norms: list[Tensor] = [
        torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.dtype in _HALF_DTYPES else None).to(device)
        for gradient in gradients
    ]
    dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in norms]))
    factor = clip_factor(norm, max_norm)
    for gradient in gradients:
        if gradient.dtype in _HALF_DTYPES:  # a 16-bit product would round the factor first
            gradient.copy_(gradient.float().mul_(factor.to(gradient.device)))
        else:
            gradient.mul_(factor.to(gradient.device))
    return norm


def sharded_norm(parameters: Iterable[Tensor], local: Callable[[Tensor], Tensor] = local_part) -> Tensor:
    """Return the common 2-norm of all gradients, the same on every rank. A collective, unless nothing is sharded.

    Parameters are sharded over the last dimension of one mesh, or whole on every rank. ``local`` returns the local part
    of a gradient, and may make it for this call. On one rank the result is bitwise that of ``get_total_norm``.
    """
    gradients = _gradients_of(parameters)
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if not sharded or sharded[0].device_mesh.size() == 1:
        return _total_norm(gradients, local)
    mesh = sharded[0].device_mesh
    dimension = next(i for i, place in enumerate(sharded[0].placements) if isinstance(place, Shard))
    total = _total_norm(sharded, local).double().square()
    dist.all_reduce(total, group=mesh.get_group(dimension))
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            total += torch.linalg.vector_norm(gradient).to(total.device).double().square()
    return total.sqrt().float()


def norm_part(gradient: Tensor) -> Tensor:
    """Return the 2-norm of a gradient, for :func:`join_norms`; of a shard, that of this rank's part."""
    part: Tensor = norm_each([gradient])[0] if isinstance(gradient, DTensor) else get_total_norm([gradient])
    return part


def join_norms(parts: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients from their norms, bitwise that of ``get_total_norm``. A collective if sharded."""
    if not isinstance(parts[0], DTensor):
        return get_total_norm(list(parts))
    norm: Any = torch.linalg.vector_norm(torch.stack(order_by_group(list(parts))))
    total: Tensor = norm.full_tensor()
    return total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients of this norm, as in ``torch.nn.utils.clip_grads_with_norm_``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def apply_clip_factor(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply plain gradients by what :func:`clip_factor` returned, in place."""
    if factor.device.type == "cpu" and factor == 1:
        return  # as most often; it would take a third of the time of a step
    for device in {gradient.device: None for gradient in gradients}:
        multiply_each([gradient for gradient in gradients if gradient.device == device], factor.to(device))


@torch.no_grad()
def clip_sharded_values(parameters: Iterable[Tensor], limit: float) -> None:
    """Clip every element of the gradients to ``[-limit, limit]``, in place."""
    for gradient in _gradients_of(parameters):
        local_part(gradient).clamp_(-limit, limit)


def _gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _total_norm(gradients: Sequence[Tensor], local: Callable[[Tensor], Tensor]) -> Tensor:
    if local is local_part or not gradients:
        return get_total_norm([local_part(gradient) for gradient in gradients])
    norms: list[Tensor] = [torch.linalg.vector_norm(local(gradient)) for gradient in gradients]
    device = norms[0].device
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in order_by_group(norms)]))
    return norm
