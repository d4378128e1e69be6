"""Let several uses of one weight share one 16-bit cast, as long as autograd keeps that alive for the backward.

Autocast makes a cast at each use, and autograd keeps each: n copies of a weight that is used n times in a step. Its own
cache makes one, but keeps it to the end of the ``autocast`` block, also under ``no_grad`` and in checkpointed layers,
where nobody needs it. Here nothing is kept: a weak reference tells whether the memory of an earlier cast still lives.

Each use has an edge of its own in the graph, so that the gradient of each is cast to 32 bit before they are summed:
equal to the bit to autocast without its cache.

Looking for a cast costs some Python at each call, and most weights are used once in a step: :class:`Sharing` tells for
which it is worth while.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.memory.device.accelerators import is_capturing, stream_id
from lightning_vram.private_names.torch.dispatch import FakeTensor, without_dispatch
from lightning_vram.private_names.torch.tensors import num_writes

_Key = tuple[int, torch.dtype, int]  # identity of the weight, dtype of the cast, stream


class _SharedCast:
    """The cast that was made last of the present values of a weight, by its memory: views of it outlive the tensor."""

    __slots__ = ("_address", "_storage", "_strides", "_version", "_weight")

    def __init__(self, weight: Tensor, cast: Tensor) -> None:
        self._weight = weakref.ref(weight)  # its identity may be another's after its death
        self._version = num_writes(weight)
        self._address = storage_address(weight)  # ``weight.data = other`` counts no version
        self._strides = cast.stride()
        self.note(cast)

    def note(self, cast: Tensor) -> None:
        """Remember another cast of the same values."""
        self._storage = weakref.ref(cast.untyped_storage())

    def is_of(self, weight: Tensor) -> bool:
        """Whether ``weight`` still is what the cast was made of."""
        is_same = self._version == num_writes(weight) and self._weight() is weight
        return is_same and self._address == storage_address(weight)

    def find(self) -> torch.UntypedStorage | None:
        """Return the memory, if autograd keeps it."""
        return self._storage()

    def make(self, storage: torch.UntypedStorage, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return another tensor on the memory that :meth:`find` found."""
        is_fake = isinstance(weight, FakeTensor)
        # A second run of a layer may find a cast that its first did not: modes that compare the two see neither.
        with nullcontext() if is_fake else without_dispatch():
            offset = 0
            empty: Any = weight.new_empty(0, dtype=dtype)
            tensor: Tensor = empty.set_(storage, offset, weight.shape, self._strides)
            return tensor


class _UseAgain(torch.autograd.Function):
    """The cast of a weight, in memory that holds it already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype, shared: _SharedCast, storage: list[Any]) -> Tensor:
        ctx.dtype = weight.dtype
        return shared.make(storage.pop(), weight, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None, None, None


class SharedCasts:
    """Makes casts of weights, one for all uses at a time."""

    def __init__(self) -> None:
        self._casts: dict[_Key, _SharedCast] = {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """Return ``weight`` in ``dtype``, differentiably, and whether in memory of an earlier cast of the same values.

        Never write to it.
        """
        stream = 0 if weight.is_cpu or isinstance(weight, FakeTensor) else _stream_of(weight.device)
        if stream is None:
            return weight.to(dtype), False
        key = id(weight), dtype, stream
        shared = self._casts.get(key)
        if shared is None or not shared.is_of(weight):
            cast = weight.to(dtype)
            self._casts[key] = _SharedCast(weight, cast)
            return cast, False
        storage = shared.find()
        if storage is None:
            cast = weight.to(dtype)
            shared.note(cast)
            return cast, False
        again: Tensor = _UseAgain.apply(weight, dtype, shared, [storage])  # type: ignore[no-untyped-call]
        return again, True

    def forget(self) -> None:
        """Use none of the casts made so far again: weights may have changed without a trace."""
        self._casts.clear()


@dataclass(eq=False, slots=True)
class Sharing:
    """Uses of a weight by some modules, which may share casts.

    Args:
        casts: To look in.
        has_run: Whether one of them ran under autocast, recorded by autograd.
        has_shared: Whether a use found the cast of another.
    """

    casts: SharedCasts
    has_run: bool = False
    has_shared: bool = False

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """See :meth:`SharedCasts.cast`."""
        cast, is_shared = self.casts.cast(weight, dtype)
        self.has_shared |= is_shared
        return cast


def _stream_of(device: torch.device) -> int | None:
    """What kernels of this thread are ordered by; ``None`` if a cast may not be shared with later ones at all."""
    return None if is_capturing(device) else stream_id(device)  # a replay runs without what went before
