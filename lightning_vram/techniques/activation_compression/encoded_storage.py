"""Encode the memory behind saved tensors once, however many views of it were saved.

Autograd keeps the whole memory of a tensor, also for a view of a part. So the memory is encoded: query, key and value,
three views of one result, share one encoding, and any strides can be restored.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_vram.core.hooks import StoredTensor
from lightning_vram.core.tensors.codecs import LOSSY_FORMATS, LossyFormat, decode, encode, pack_bits, unpack_bits
from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.memory.storages import NO_VERSION, version_of
from lightning_vram.private_names.dispatcher import FakeTensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size
_SMALL_INTEGERS = (torch.uint8, torch.int16, torch.int32)


class Encoding(NamedTuple):
    """What was made of the elements of a storage, and how to get them back."""

    pieces: Sequence[Tensor | StoredTensor]
    decode: Callable[[list[Tensor]], Tensor]
    """Takes the pieces, returns the elements [n] in memory of their own."""

    @property
    def num_bytes(self) -> int:
        """Bytes it keeps on the device."""
        return sum(p.num_bytes if isinstance(p, StoredTensor) else p.nbytes for p in self.pieces)

    def read(self) -> list[Tensor]:
        """Return the pieces."""
        return [piece.give() if isinstance(piece, StoredTensor) else piece for piece in self.pieces]


Encode = Callable[[Tensor], Encoding | None]


def can_be_read(tensor: Tensor) -> bool:
    """Whether a look at the values costs no wait for a device. NumPy writes to no other memory."""
    return tensor.device.type == "cpu"


def pack_mask(numbers: Tensor) -> Encoding:
    """Keep a mask, bool [n], as bits; of other ``numbers``, where ReLU's backward lets gradients pass, NaN included."""
    dtype, size = numbers.dtype, numbers.numel()
    mask = numbers if dtype is torch.bool else (numbers <= 0).logical_not_()
    return Encoding([pack_bits(mask)], lambda pieces: _unpack(pieces[0], size, dtype))


def pack_two_values(numbers: Tensor) -> Encoding | None:
    """Keep ``numbers``, [n] of any dtype, as bits, if they have two values; ``None`` if they have more."""
    dtype, size = numbers.dtype, numbers.numel()
    as_integers = numbers.view(_INTEGERS[dtype.itemsize])  # -0.0 and NaN are values like others
    low, high = as_integers.aminmax()
    is_high = as_integers == high
    if can_be_read(numbers):
        are_two = (is_high | (as_integers == low)).all()  # of fakes, too: the step takes the same memory
        if not isinstance(are_two, FakeTensor) and not are_two:
            return None

    def decode(pieces: list[Tensor]) -> Tensor:
        bits, low, high = pieces
        return torch.where(_unpack(bits, size, torch.bool), high, low).view(dtype)

    return Encoding([pack_bits(is_high), low, high], decode)


def shrink_indices(indices: Tensor, largest: int) -> Encoding | None:
    """Keep ``indices``, [n], in the smallest integers that hold ``largest``; ``None`` if that is no smaller."""
    dtype = indices.dtype
    if can_be_read(indices):
        low, high = indices.aminmax()
        if not (isinstance(low, FakeTensor) or (int(low) >= 0 and int(high) <= largest)):
            return None  # somebody wrote there past PyTorch
    narrow = next((narrow for narrow in _SMALL_INTEGERS if largest <= torch.iinfo(narrow).max), dtype)
    if narrow.itemsize >= dtype.itemsize:
        return None
    return Encoding([indices.to(narrow)], lambda pieces: pieces[0].to(dtype))


def encode_lossy(numbers: Tensor, to: LossyFormat, block_size: int) -> Encoding:
    """Keep ``numbers``, [n], in low precision."""
    dtype, size = numbers.dtype, numbers.numel()
    return Encoding(encode(numbers, to, block_size), lambda pieces: decode(pieces, to, dtype, size))


def _unpack(bits: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return unpack_bits(bits, torch.empty(size, dtype=dtype, device=bits.device))


def elements_of(tensor: Tensor) -> Tensor:
    """Return all elements of the memory of ``tensor``, [n]: a view."""
    size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((size,), (1,), 0)


class EncodedStorage:
    """The encoding of the memory of a tensor, which was in this ``state``."""

    __slots__ = ("__weakref__", "_encode", "_last", "dtype", "encoding", "exact", "kind", "state")

    def __init__(self, tensor: Tensor, kind: str, state: Any, encode: Encode, encoding: Encoding) -> None:
        self.dtype, self.kind, self.state = tensor.dtype, kind, state
        self._encode, self.encoding = encode, encoding  # which that makes, again and again
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None  # a view of what was decoded, version and stream
        self.exact: Callable[[], Tensor | None] | None = None
        """Returns the elements as they were, if they are wanted now."""

    @property
    def is_given_up(self) -> bool:
        """Whether somebody else keeps what it encoded."""
        return not self.encoding.pieces

    def give_up(self, source: Callable[[], Tensor]) -> int:
        """Leave it to ``source`` to return a tensor on all elements; return the bytes that are not kept any more."""
        num_bytes = self.encoding.num_bytes
        self.encoding = Encoding([], lambda _: source())
        self._last = self.exact = None
        return num_bytes

    def still_holds(self, tensor: Tensor) -> bool:
        """Whether it encodes what ``tensor`` holds now. On the host it is encoded again: NumPy may have written."""
        if tensor.dtype is not self.dtype or not can_be_read(tensor):
            return tensor.dtype is self.dtype
        again = self._encode(elements_of(tensor))
        return again is not None and all(map(_are_same, self.encoding.read(), again.read()))

    def give(self, shape: torch.Size, strides: tuple[int, ...], offset: int) -> Tensor:
        """Return a view of the elements."""
        elements, start = None, 0
        if self.exact is not None and (elements := self.exact()) is not None:
            return elements.as_strided(shape, strides, offset)
        if self._last is not None:  # somebody who uses the same memory may have it decoded
            reference, version, stream = self._last
            elements = reference()
            if elements is not None and (version_of(elements) != version or stream_id(elements.device) != stream):
                elements = None  # and have written to it, or in another queue
        if elements is None:
            elements = self.encoding.decode(self.encoding.read())
            start = int(elements.storage_offset())
        view = elements.as_strided(shape, strides, start + offset)
        version = version_of(view)  # none in inference mode: a write to it would go unseen
        if self.encoding.pieces and version != NO_VERSION:
            self._last = weakref.ref(view), version, stream_id(view.device)
        return view


def _are_same(kept: Tensor, made: Tensor) -> bool:
    kept_bytes, made_bytes = (piece.reshape(-1).view(torch.uint8) for piece in (kept, made))  # NaN is equal to itself
    return isinstance(kept, FakeTensor) or torch.equal(kept_bytes, made_bytes)


class Encoded(StoredTensor):
    """A saved tensor: where it lies in an encoded memory; or, as long as it is not encoded, itself."""

    __slots__ = ("_place", "source")

    def __init__(self, tensor: Tensor, source: EncodedStorage | Tensor) -> None:
        self.source = source
        self._place = tensor.shape, tensor.stride(), int(tensor.storage_offset())

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return self.source.nbytes if isinstance(self.source, Tensor) else self.source.encoding.num_bytes

    @property
    def is_exact(self) -> bool:  # noqa: D102
        source = self.source
        return isinstance(source, Tensor) or source.is_given_up or source.kind not in LOSSY_FORMATS

    def give(self) -> Tensor:  # noqa: D102
        return self.source if isinstance(self.source, Tensor) else self.source.give(*self._place)
