"""Encode the memory behind saved tensors once, however many views of it were saved.

Autograd keeps the whole memory of a tensor, also for a view of a part. So the memory is encoded: query, key and value,
three views of one result, share one encoding, and any strides can be restored.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_vram.core.hooks import StoredTensor
from lightning_vram.core.tensors.codecs import pack_bits, unpack_bits
from lightning_vram.core.tensors.properties import NO_VERSION, alias, flat_as_stored, is_dense, version_of
from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.private_names.dispatcher import FakeTensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size
_SMALL_INTEGERS = (torch.uint8, torch.int16, torch.int32)


class Encoding(NamedTuple):
    """What was made of the elements of a storage, and how to get them back."""

    pieces: list[Tensor]
    decode: Callable[[list[Tensor]], Tensor]
    """Takes the pieces, returns the elements [n] in memory of their own."""


def can_be_read(tensor: Tensor) -> bool:
    """Whether a look at the values costs no wait for a device. NumPy writes to no other memory."""
    return tensor.device.type == "cpu"


def is_certain(flag: Tensor) -> bool:
    """Whether ``flag`` is true. Of fake tensors nothing is known that speaks against what was noted."""
    return isinstance(flag, FakeTensor) or bool(flag)


def pack_mask(mask: Tensor) -> Encoding:
    """Keep ``mask``, bool [n], as bits."""
    size = mask.numel()
    return Encoding([pack_bits(mask)], lambda pieces: _unpack(pieces[0], size, torch.bool))


def pack_two_values(numbers: Tensor) -> Encoding | None:
    """Keep ``numbers``, [n] of any dtype, as bits, if they have two values; ``None`` if they have more."""
    dtype, size = numbers.dtype, numbers.numel()
    as_integers = numbers.view(_INTEGERS[dtype.itemsize])  # -0.0 and NaN are values like others
    low, high = as_integers.aminmax()
    is_high = as_integers == high
    if can_be_read(numbers) and not is_certain((is_high | (as_integers == low)).all()):
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
        is_fake = isinstance(indices, FakeTensor)
        if not is_fake and (int(low) < 0 or int(high) > largest):
            return None  # somebody wrote there past PyTorch
    narrow = next((narrow for narrow in _SMALL_INTEGERS if largest <= torch.iinfo(narrow).max), dtype)
    if narrow.itemsize >= dtype.itemsize:
        return None
    return Encoding([indices.to(narrow)], lambda pieces: pieces[0].to(dtype))


def pack_signs(numbers: Tensor, condition: Callable[[Tensor], Tensor]) -> Encoding:
    """Keep where ``condition`` holds. What comes back is 1 there and 0 elsewhere."""
    dtype, size = numbers.dtype, numbers.numel()
    return Encoding([pack_bits(condition(numbers))], lambda pieces: _unpack(pieces[0], size, dtype))


def _unpack(bits: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return unpack_bits(bits, torch.empty(size, dtype=dtype, device=bits.device))


Encode = Callable[[Tensor], Encoding | None]
HandOn = Callable[[Tensor], StoredTensor | None]


def elements_of(tensor: Tensor) -> Tensor:
    """Return all elements of the memory of ``tensor``, [n]: a view."""
    size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((size,), (1,), 0)


def source_of_elements(tensor: Tensor, handed: StoredTensor | None) -> Callable[[], Tensor] | None:
    """Return a function that returns all elements of the memory of ``tensor``, which stays, or was taken."""
    if handed is None:
        elements = elements_of(alias(tensor))
        return lambda: elements
    is_all = is_dense(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()
    return (lambda: flat_as_stored(handed.give())) if is_all else None  # else a part is left


class ExactSwitch:
    """Says, to all encodings of a run, whether the exact numbers are wanted for once."""

    def __init__(self) -> None:
        self.is_exact = False


class EncodedStorage:
    """The encoding of the memory of a tensor."""

    __slots__ = (
        *("__weakref__", "_decode", "_encode", "_exact", "_last", "_pieces", "_which"),
        *("dtype", "is_exact", "num_bytes"),
    )

    def __init__(
        self, tensor: Tensor, encode: Encode, encoding: Encoding, hand_on: HandOn, *, is_exact: bool = True
    ) -> None:
        self.dtype, self.is_exact = tensor.dtype, is_exact
        self._encode = encode  # makes an encoding of its elements, and would make the same one again
        self._decode = encoding.decode
        self._pieces: list[Tensor | StoredTensor] = [hand_on(piece) or piece for piece in encoding.pieces]
        self._exact: Tensor | None = None
        self._which: ExactSwitch | None = None
        self._last: tuple[weakref.ref[Tensor], int, int, int] | None = None  # with version, offset and stream
        sizes = (piece.num_bytes if isinstance(piece, StoredTensor) else piece.nbytes for piece in self._pieces)
        self.num_bytes = sum(sizes)

    def keep_exact_too(self, tensor: Tensor, which: ExactSwitch) -> None:
        """Keep the memory of ``tensor`` as well; ``which`` says when that is given."""
        self._exact, self._which = elements_of(tensor), which

    def still_holds(self, tensor: Tensor) -> bool:
        """Whether it encodes what ``tensor`` holds now. On the host it is encoded again: NumPy may have written."""
        if tensor.dtype is not self.dtype or not self._pieces:
            return False
        if not can_be_read(tensor):
            return True
        encoding = self._encode(elements_of(tensor))
        if encoding is None:
            return False
        pairs = zip(self._read(), encoding.pieces, strict=True)
        return all(_are_same(kept, made) for kept, made in pairs)

    @property
    def is_given_up(self) -> bool:
        """Whether somebody else keeps what it encoded."""
        return not self._pieces

    def replace(self, source: Callable[[], Tensor]) -> None:
        """Give up the encoding for what somebody else keeps: ``source`` returns a tensor on all elements."""
        self._pieces = []
        self._decode = lambda _: source()
        self._exact = self._last = None
        self.num_bytes, self.is_exact = 0, True

    def give(self, shape: torch.Size, strides: tuple[int, ...], offset: int) -> Tensor:
        """Return a view of the elements."""
        if self._which is not None and self._which.is_exact and self._exact is not None:
            return self._exact.as_strided(shape, strides, offset)
        start = 0
        elements: Tensor | None = None
        if self._last is not None:  # somebody who uses the same memory may have it decoded
            reference, version, start, stream = self._last
            elements = reference()
            if elements is not None and (version_of(elements) != version or stream_id(elements.device) != stream):
                elements = None  # and have written to it, or in another queue
        if elements is None:
            elements = self._decode(self._read())
            start = int(elements.storage_offset())
        view = elements.as_strided(shape, strides, start + offset)
        version = version_of(view)  # none in inference mode: a write to it would go unseen
        self._last = (weakref.ref(view), version, start, stream_id(view.device)) if version != NO_VERSION else None
        return view

    def _read(self) -> list[Tensor]:
        return [piece.give() if isinstance(piece, StoredTensor) else piece for piece in self._pieces]


def _are_same(kept: Tensor, made: Tensor) -> bool:
    kept_bytes, made_bytes = (piece.reshape(-1).view(torch.uint8) for piece in (kept, made))  # NaN is equal to itself
    return isinstance(kept, FakeTensor) or torch.equal(kept_bytes, made_bytes)


class Encoded(StoredTensor):
    """A saved tensor: where it lies in an encoded memory."""

    __slots__ = ("_offset", "_shape", "_strides", "storage")

    def __init__(self, tensor: Tensor, storage: EncodedStorage) -> None:
        self.storage = storage
        self._shape, self._strides, self._offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return self.storage.num_bytes

    @property
    def is_exact(self) -> bool:  # noqa: D102
        return self.storage.is_exact

    def give(self) -> Tensor:  # noqa: D102
        return self.storage.give(self._shape, self._strides, self._offset)
