"""Clip the gradients of sharded parameters, on their local parts."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from lightning_vram.private_names.torch.operators import multiply_each
from lightning_vram.private_names.torch.tensors import local_part_of


def sharded_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the common 2-norm of all gradients, the same on every rank. A collective, unless nothing is sharded.

    On one rank it is that of ``torch.nn.utils.get_total_norm`` to the bit.

    Args:
        parameters: Sharded over the last dimension of one mesh, or whole on every rank; with gradients or without.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if not sharded or sharded[0].device_mesh.size() == 1:
        return get_total_norm([_local(gradient) for gradient in gradients])
    mesh = sharded[0].device_mesh
    dimension = next(i for i, place in enumerate(sharded[0].placements) if isinstance(place, Shard))
    total = get_total_norm([_local(gradient) for gradient in sharded]).double().square()
    dist.all_reduce(total, group=mesh.get_group(dimension))
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            total += torch.linalg.vector_norm(gradient).to(total.device).double().square()
    return total.sqrt().float()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return what gradients of this norm are scaled by, as ``torch.nn.utils.clip_grads_with_norm_`` has it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply plain gradients in place."""
    if factor.device.type == "cpu" and factor == 1:
        return  # as most often; it would take a third of the time of a step
    if gradients:
        multiply_each(list(gradients), factor.to(gradients[0].device))


@torch.no_grad()
def clip_sharded_values(parameters: Iterable[Tensor], limit: float) -> None:
    """Clip every element of the gradients to ``[-limit, limit]``, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            _local(parameter.grad).clamp_(-limit, limit)


def _local(gradient: Tensor) -> Tensor:
    return local_part_of(gradient) if isinstance(gradient, DTensor) else gradient
