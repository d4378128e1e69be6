"""Let autograd save nothing of a tensor that can be computed again from tensors that stay alive, such as a weight."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.stage import pack_in_place, unpack
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.private_names.torch.autograd import innermost_hooks

Make = Callable[[], Tensor]


class _Remade:
    """How to compute a saved tensor, and where in it the saved view is."""

    __slots__ = ("_make", "_offset", "_shape", "_strides")

    def __init__(self, make: Make, saved: Tensor) -> None:
        self._make = make
        self._offset, self._shape, self._strides = saved.storage_offset(), saved.shape, saved.stride()

    def make(self) -> Tensor:
        with torch.no_grad():
            return self._make().as_strided(self._shape, self._strides, self._offset)


class RemadeSaves:
    """The tensors of one call that the backward computes again from others that stay alive, such as a weight.

    Its hooks are the innermost ones inside; other tensors go to the hooks outside.
    """

    __slots__ = ("_hooks", "_makes", "_pack_outside", "_unpack_outside")

    def __init__(self) -> None:
        self._makes: dict[int, Make] = {}  # by address of the storage
        self._pack_outside, self._unpack_outside = innermost_hooks() or (pack_in_place, unpack)

    def add(self, tensor: Tensor, make: Make) -> Tensor:
        """Return ``tensor``, which ``make`` computes again. It must live to the end of the call."""
        self._makes[storage_address(tensor)] = make
        return tensor

    def hooks(self) -> saved_tensors_hooks:
        """Return the context for the call."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        make = self._makes.get(storage_address(tensor))
        return _Remade(make, tensor) if make is not None else self._pack_outside(tensor)

    @hide_from_dynamo
    def _unpack(self, packed: Any) -> Tensor:
        return packed.make() if type(packed) is _Remade else self._unpack_outside(packed)
