"""Many tensors in one flat one, so that a kernel runs once for all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_vram.private_names.torch.operators import copy_each


def empty_flat(tensors: Sequence[Tensor], device: torch.device | str | None) -> Tensor:
    """Return room for the elements of ``tensors``, in fp32: flat, not yet written."""
    return torch.empty(sum(tensor.numel() for tensor in tensors), dtype=torch.float32, device=device)


def views_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of each of ``tensors`` in ``flat``, in its shape. There must be no other elements."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors]) if tensors else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def widened(tensors: Sequence[Tensor], device: torch.device | str | None) -> tuple[Tensor, list[Tensor]]:
    """Copy tensors into one flat fp32 tensor on ``device``, and return it and the views of each in it."""
    flat = empty_flat(tensors, device)
    views = views_like(flat, tensors)
    if tensors:
        copy_each(views, [tensor.detach() for tensor in tensors])
    return flat, views
