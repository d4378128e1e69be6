"""Multiply gradients, wherever and however they are stored."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_vram.private_names.fsdp2.sharded_tensors import local_part
from lightning_vram.private_names.torch.operators import multiply_each
from lightning_vram.private_names.torch.tensors import sparse_values


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients of ``parameters``, each once, in place: shards, sparse ones, and on several devices, too.

    The host blocks only if a gradient is on another device than a ``factor`` that is a tensor.
    """
    gradients = {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients.values():
        values = _values(gradient)
        by_device.setdefault(values.device, []).append(values)
    for device, tensors in by_device.items():
        multiply_each(tensors, factor.to(device) if isinstance(factor, Tensor) else factor)


def _values(gradient: Tensor) -> Tensor:
    """Return the memory of a gradient: of this rank, and without zeros that are not stored."""
    values: Tensor = local_part(gradient.detach())
    if values.layout is torch.sparse_coo:
        return sparse_values(values)
    return values if values.layout is torch.strided else values.values()
