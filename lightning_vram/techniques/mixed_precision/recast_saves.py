"""Let autograd keep a 32-bit weight, which is alive anyway, in the place of the 16-bit cast that was made of it.

The backward casts again: the same kernel on the same values, so gradients are equal to the bit. Whatever else is saved
meanwhile goes to the hooks outside: those of a checkpoint, of offloading, of the user.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.stage import pack_in_place, unpack
from lightning_vram.core.tensors.versions import check_version, storage_address
from lightning_vram.private_names.torch.autograd import innermost_hooks
from lightning_vram.private_names.torch.tensors import num_writes


class _Recast:
    """What is kept of a saved cast, or of a view of one: the weight, and how to get there."""

    __slots__ = ("_dtype", "_offset", "_shape", "_strides", "_version", "_weight")

    def __init__(self, weight: Tensor, version: int, saved: Tensor) -> None:
        self._weight = weight  # itself, not an alias: FSDP2 refills its memory
        self._version = version
        self._dtype, self._offset = saved.dtype, saved.storage_offset()
        self._shape, self._strides = saved.shape, saved.stride()

    def make(self) -> Tensor:
        weight = self._weight
        try:
            check_version(weight, self._version, weight.shape)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} It is a weight, which the backward casts to {str(self._dtype).removeprefix('torch.')} again: "
                "set recast_in_backward=False (plain autocast keeps a copy and would not notice)."
            ) from None
        with torch.no_grad():
            return weight.to(self._dtype).as_strided(self._shape, self._strides, self._offset)


class RecastSaves:
    """Makes the casts of one call; a context manager that sees them saved.

    Its hooks are the innermost ones inside.
    """

    __slots__ = ("_hooks", "_pack_outside", "_unpack_outside", "_weights")

    def __init__(self) -> None:
        self._weights: dict[int, tuple[Tensor, int]] = {}  # by address of the storage of the cast
        self._pack_outside, self._unpack_outside = innermost_hooks() or (pack_in_place, unpack)

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``weight`` in ``dtype``, differentiably. It must live to the end of the call."""
        cast = weight.to(dtype)
        self._weights[storage_address(cast)] = weight, num_writes(weight)
        return cast

    def hooks(self) -> saved_tensors_hooks:
        """Return the context for the call."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        known = self._weights.get(storage_address(tensor))
        return _Recast(*known, tensor) if known is not None else self._pack_outside(tensor)

    @hide_from_dynamo
    def _unpack(self, packed: Any) -> Tensor:
        return packed.make() if type(packed) is _Recast else self._unpack_outside(packed)
