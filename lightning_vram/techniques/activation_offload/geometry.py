"""How tensors lie in their memory, as flat bytes."""

import torch
from torch import Tensor

from lightning_vram.core.host.arena import unseen
from lightning_vram.private_names.torch.operators import neg_view

ALIGNED_BYTES = 256
"""Kernels choose by the alignment of addresses. Those of copies are the originals', modulo this."""


class Geometry:
    """How a tensor lies in its memory."""

    __slots__ = ("is_conj", "is_neg", "offset", "shape", "strides")

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.shape, self.strides, self.offset = tensor.shape, tensor.stride(), offset
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()


def find_span(tensor: Tensor) -> tuple[int, int]:
    """Return the first element and the number of elements to send: of all its memory if it covers half of that.

    Else they begin at an aligned address, up to 255 bytes below the tensor.
    """
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    total, remainder = divmod(tensor.untyped_storage().nbytes(), tensor.dtype.itemsize)
    if not remainder and 2 * length >= total:
        return 0, total
    offset = int(tensor.storage_offset())
    below = offset % (ALIGNED_BYTES // tensor.dtype.itemsize)
    return offset - below, length + below


def to_flat(tensor: Tensor, start: int, length: int) -> Tensor:
    """Return ``length`` elements of the memory of an alias from ``start`` on, as they lie there."""
    with unseen(tensor):
        if tensor.is_neg():
            tensor = neg_view(tensor)
        if tensor.is_conj():
            tensor = tensor.conj()
        return tensor.as_strided((length,), (1,), start)


def as_bytes(flat: Tensor) -> Tensor:
    """Return the bytes of a flat tensor."""
    with unseen(flat):
        return flat.view(torch.uint8)


def to_view(flat: Tensor, dtype: torch.dtype, geometry: Geometry) -> Tensor:
    """Return the tensor that ``geometry`` tells of, on the bytes of ``flat``."""
    with unseen(flat):
        remainder = flat.numel() % dtype.itemsize
        typed = (flat.narrow(0, 0, flat.numel() - remainder) if remainder else flat).view(dtype)
        view = typed.as_strided(geometry.shape, geometry.strides, typed.storage_offset() + geometry.offset)
        if geometry.is_conj:
            view = view.conj()
        return neg_view(view) if geometry.is_neg else view
