"""What is kept in place of the memory of saved tensors: one encoding, however many views of it were saved.

Autograd keeps the whole memory of a tensor, also for a view of a part. So that is what is encoded: query, key and
value, three views of one result, share one encoding, and any strides come back.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_vram.core.hooks.stage import Taken
from lightning_vram.core.tensors.layout import flat_as_stored, is_dense
from lightning_vram.core.tensors.versions import NO_VERSION, alias, version_of
from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.techniques.activation_compression.lossless_codecs import Encoding, can_be_read

Encode = Callable[[Tensor], Encoding | None]
HandOn = Callable[[Tensor], Taken | None]


def elements_of(tensor: Tensor) -> Tensor:
    """Return all elements of the memory of ``tensor``, [n]: a view."""
    size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    return tensor.as_strided((size,), (1,), 0)


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether each element of the memory of ``tensor`` is one of its own, and none is two."""
    return is_dense(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()


def source_of_elements(tensor: Tensor, handed: Taken | None) -> Callable[[], Tensor] | None:
    """Return a function that returns all elements of the memory of ``tensor``, which stays, or was taken."""
    if handed is None:
        elements = elements_of(alias(tensor))
        return lambda: elements
    return (lambda: flat_as_stored(handed.give())) if fills_its_memory(tensor) else None  # else a part is left


class WhichGiven:
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
        self._pieces: list[Tensor | Taken] = [hand_on(piece) or piece for piece in encoding.pieces]
        self._exact: Tensor | None = None
        self._which: WhichGiven | None = None
        self._last: tuple[weakref.ref[Tensor], int, int, int] | None = None  # with version, offset and stream
        self.num_bytes = sum(piece.num_bytes if isinstance(piece, Taken) else piece.nbytes for piece in self._pieces)

    def keep_exact_too(self, tensor: Tensor, which: WhichGiven) -> None:
        """Keep the memory of ``tensor`` as well; ``which`` says when that is given."""
        self._exact, self._which = elements_of(tensor), which

    def still_holds(self, tensor: Tensor) -> bool:
        """Whether it encodes what the memory of ``tensor`` holds now.

        On the host NumPy may have written there, unseen: the memory is encoded once more and compared, at the cost of
        a second save of the tensor. Elsewhere nothing is looked at.
        """
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
        return [piece.give() if isinstance(piece, Taken) else piece for piece in self._pieces]


def _are_same(kept: Tensor, made: Tensor) -> bool:
    kept_bytes, made_bytes = (piece.reshape(-1).view(torch.uint8) for piece in (kept, made))  # NaN is equal to itself
    return isinstance(kept, FakeTensor) or torch.equal(kept_bytes, made_bytes)


class Encoded(Taken):
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
