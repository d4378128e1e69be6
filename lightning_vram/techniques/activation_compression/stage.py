"""Save activations in fewer bytes: lossless where possible, with a bounded error where asked.

Lossless: bool masks and dropout's float masks as bits, indices of pools, sorts and maxima in the smallest integer type,
results of ReLU as bits if only ReLU saved them, one copy of what was saved several times. Gradients are bit-exact. With
a bounded error, for chosen layers: activations in bf16, fp8 or int8.

Cost: a Python call per operator and per saved tensor, and one pass over what is encoded and decoded. No gain: a ReLU in
place, in front of a convolution, which saves the values anyway, or inside another stage; what a
``torch.autograd.Function`` holds in attributes, what ``torch.func`` transforms, compiled code and the user's own
saved-tensor hooks save. Memory that the model itself keeps alive is not freed: the bits are stored in addition. A write
that PyTorch does not see (NumPy, a custom kernel) after a save does not reach the backward, and neither does a write to
``.data`` after the stage was left; between two saves of one tensor it is noticed on the CPU only.
``grad_fn._saved_result`` of a ReLU shows ones and zeros.
"""

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core.hooks import SavedTensorStage, StoredTensor, is_exact_only
from lightning_vram.core.layers import RunningLayers
from lightning_vram.core.tensors import codecs
from lightning_vram.core.tensors.codecs import decode, encode
from lightning_vram.core.tensors.properties import alias, flat_as_stored, is_dense
from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.memory.storages import NO_VERSION, ByStorage, storage_address, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import FakeTensor, hide_from_dynamo
from lightning_vram.private_names.torch import base_of, has_own_result, innermost_hooks, is_view, without_autocast
from lightning_vram.techniques.activation_compression.value_notes import ValueNotes

_MAX_SHARE = 16  # a view of less than that part of its memory is left alone: it is a part of something else's buffer
_SAVING = ("lightning_vram.", "torch.autograd.function")  # modules between autograd and who has it save something


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size
_SMALL_INTEGERS = (torch.uint8, torch.int16, torch.int32)

Encoding = tuple[Sequence[Tensor], Callable[[list[Tensor]], Tensor]]
"""What was made of the elements of a storage, and what makes of that the elements, [n], in memory of their own."""

Encode = Callable[[Tensor], Encoding | None]


def can_be_read(tensor: Tensor) -> bool:
    """Whether a look at the values costs no wait for a device. NumPy writes to no other memory."""
    return tensor.device.type == "cpu"


def pack_mask(numbers: Tensor) -> Encoding:
    """Keep a mask, bool [n], as bits; of other ``numbers``, where ReLU's backward lets gradients pass, NaN included."""
    dtype, size = numbers.dtype, numbers.numel()
    mask = numbers if dtype is torch.bool else (numbers <= 0).logical_not_()
    return [codecs.pack_bits(mask)], lambda pieces: _unpack(pieces[0], size, dtype)


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

    return [codecs.pack_bits(is_high), low, high], decode


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
    return [indices.to(narrow)], lambda pieces: pieces[0].to(dtype)


def encode_lossy(numbers: Tensor, to: codecs.LossyFormat, block_size: int) -> Encoding:
    """Keep ``numbers``, [n], in low precision."""
    dtype, size = numbers.dtype, numbers.numel()
    return encode(numbers, to, block_size), lambda pieces: decode(pieces, to, dtype, size)


def _unpack(bits: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return codecs.unpack_bits(bits, torch.empty(size, dtype=dtype, device=bits.device))


def elements_of(tensor: Tensor) -> Tensor:
    """Return all elements of the memory of ``tensor``, [n]: a view."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.dtype.itemsize,), (1,), 0)


class EncodedStorage:
    """The encoding of the memory of a tensor, which was in this ``state``: once, however many views of it are saved.

    Autograd keeps the whole memory of a tensor, also for a view of a part. So the memory is encoded: query, key and
    value, three views of one result, share one encoding, and any strides can be restored.
    """

    __slots__ = ("__weakref__", "_decode", "_encode", "_last", "dtype", "exact", "kind", "pieces", "state")

    def __init__(self, tensor: Tensor, kind: str, state: Any, encode: Encode) -> None:
        self.dtype, self.kind, self.state = tensor.dtype, kind, state
        self._encode = encode
        self.pieces: Sequence[Tensor | StoredTensor] = []
        self._decode: Callable[[list[Tensor]], Tensor]
        self._last: tuple[weakref.ref[Tensor], int, int] | None = None  # a view of what was decoded, version and stream
        self.exact: Callable[[], Tensor | None] | None = None
        """Returns the elements as they were, if they are wanted now."""

    def make(self, tensor: Tensor, hand_on: Callable[[Tensor], StoredTensor | None]) -> bool:
        """Encode what ``tensor`` holds now, unless that saves nothing."""
        encoding = self._encode(elements_of(tensor))
        if encoding is None or sum(piece.nbytes for piece in encoding[0]) >= tensor.untyped_storage().nbytes():
            return False
        self.pieces, self._decode = [hand_on(piece) or piece for piece in encoding[0]], encoding[1]
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes it keeps on the device."""
        return sum(piece.num_bytes if isinstance(piece, StoredTensor) else piece.nbytes for piece in self.pieces)

    @property
    def is_given_up(self) -> bool:
        """Whether somebody else keeps what it encoded."""
        return not self.pieces

    def give_up(self, source: Callable[[], Tensor]) -> int:
        """Leave it to ``source`` to return a tensor on all elements; return the bytes that are not kept any more."""
        num_bytes = self.num_bytes
        self.pieces, self._decode = [], lambda _: source()
        self._last = self.exact = None
        return num_bytes

    def still_holds(self, tensor: Tensor) -> bool:
        """Whether it encodes what ``tensor`` holds now. On the host it is encoded again: NumPy may have written."""
        if tensor.dtype is not self.dtype or not can_be_read(tensor):
            return tensor.dtype is self.dtype
        again = self._encode(elements_of(tensor))
        return again is not None and all(map(_are_same, self._read(), again[0]))

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
            elements = self._decode(self._read())
            start = int(elements.storage_offset())
        view = elements.as_strided(shape, strides, start + offset)
        version = version_of(view)  # none in inference mode: a write to it would go unseen
        if self.pieces and version != NO_VERSION:
            self._last = weakref.ref(view), version, stream_id(view.device)
        return view

    def _read(self) -> list[Tensor]:
        return [piece.give() if isinstance(piece, StoredTensor) else piece for piece in self.pieces]


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
        return self.source.nbytes if isinstance(self.source, Tensor) else self.source.num_bytes

    @property
    def is_exact(self) -> bool:  # noqa: D102
        source = self.source
        return isinstance(source, Tensor) or source.is_given_up or source.kind not in codecs.LOSSY_FORMATS

    def give(self) -> Tensor:  # noqa: D102
        return self.source if isinstance(self.source, Tensor) else self.source.give(*self._place)


@dataclass
class CompressionReport:
    """What one run saved for its backward. Memory that several tensors share counts once."""

    saved_bytes: int = 0
    """Bytes that plain autograd would have kept, parameters and buffers not counted."""
    kept_bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Encodings by kind: ``"mask"``, ``"two values"``, ``"indices"``, ``"signs"``, and those with a loss."""


@dataclass(slots=True)
class _Memory:
    """What is known of a storage of which something was saved."""

    num_writes: int = 0  # seen since, also those that autograd does not count
    made: list[weakref.ref[EncodedStorage]] = field(default_factory=list)  # of it, in any state; the newest first
    whole_state: Any = None  # in which it was left as it is
    is_whole: bool = False  # counted in full

    def state(self, tensor: Tensor) -> tuple[int, int, int]:
        """Return what changes as somebody writes to ``tensor``, on this memory, or uses it on another stream."""
        return version_of(tensor), self.num_writes, stream_id(tensor.device)

    def encodings(self, state: tuple[int, int, int] | None = None) -> list[EncodedStorage]:
        """Return those in use, made in this ``state`` or, if it is ``None``, in any."""
        found = [made for reference in self.made if (made := reference()) is not None]
        return [made for made in found if not made.is_given_up and state in (None, made.state)]


class CompressionStage(SavedTensorStage):
    """Keeps saved tensors in fewer bytes while it is entered.

    With a loss it stores results and inputs of operators that have a gradient; never what has none (data, constants,
    what custom functions put aside), leaves, second results and statistics of operators, what is made of those or of
    weights only, what a backward magnifies an error of (see :mod:`~lightning_vram.core.operators`), inputs of
    checkpoints, and tensors whose last size is 1. Differences of nearly equal terms, as in a softmax made of ``exp``
    and ``sum``, magnify an error that no operator shows.

    The arguments are those of ``ActivationCompression``, ``layers`` as modules; ``None``: all. Parameters and buffers
    of ``module`` stay alive anyway. See ``encode`` for the error of ``lossy``.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 1))
        >>> with CompressionStage(net) as stage:
        ...     loss = net(torch.ones(64, 64)).sum()
        >>> sorted(stage.report.kinds)
        ['signs', 'two values']
        >>> loss.backward()
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        lossless: bool = True,
        lossy: codecs.LossyFormat | None = None,
        layers: Sequence[nn.Module] | None = None,
        block_size: int = 128,
        min_bytes: int = 1024,
    ) -> None:
        super().__init__(module)
        self._lossless, self._lossy, self._block_size, self._min_bytes = lossless, lossy, block_size, min_bytes
        self._layers = RunningLayers(layers) if layers is not None else None
        self._notes = ValueNotes(notes_exact=lossy is not None)
        self._memories: ByStorage[_Memory] = ByStorage()
        self._pending: tuple[_Memory, int, weakref.ref[Encoded]] | None = None  # ReLU's result, and its stream
        self.keeps_exact = self.has_exact = self.gives_exact = False
        """Whether runs keep the exact numbers, too; whether the last one did; whether backwards compute with them."""
        self.report = CompressionReport()

    @override
    def begin(self, stack: ExitStack) -> OperatorSubscriber | None:
        self.report = CompressionReport()
        self.has_exact = self.keeps_exact
        for end in (self._notes.clear, self._memories.clear, self._shrink_pending):
            stack.callback(end)
        if self._layers is not None:
            stack.enter_context(self._layers.watching())
        self._notes.buffers, self._notes.listener = frozenset(self._buffers), self
        stack.enter_context(self._notes)
        return self._notes

    @override
    def __exit__(self, *error: object) -> None:
        if any(error):
            self._pending = None  # no backward comes, and after an error of the device nothing can be packed
        super().__exit__(*error)

    @hide_from_dynamo
    def on_exact_argument(self, tensor: Tensor) -> None:
        """Give up what was made of ``tensor`` with a loss."""
        memory = self._memories.find(tensor)
        if memory is not None and any(made.kind == self._lossy for made in memory.encodings(memory.state(tensor))):
            with torch.no_grad(), without_autocast():
                self._leave(elements_of(alias(tensor)), memory)

    @hide_from_dynamo
    def on_write(self, target: Tensor, *, is_certain: bool) -> None:
        """Give up what was made of ``target``: plain autograd finds what is written there, or refuses it."""
        memory = self._memories.find(target)
        if memory is None:
            return
        memory.num_writes += 1
        encodings = memory.encodings() if is_certain else []
        if encodings or self._is_pending(memory):
            self._keep_whole(memory, target.untyped_storage().nbytes())
        for made in encodings:
            elements = torch.empty(0, dtype=made.dtype, device=target.device).set_(target.untyped_storage())
            self.report.kept_bytes -= made.give_up(partial(elements_of, elements))

    @override
    def take(self, tensor: Tensor) -> StoredTensor | None:
        if not storage_address(tensor) or not tensor.numel():
            return self.hand_on(tensor)
        memory = self._memories.find(tensor)
        if memory is None:
            self._memories.note(tensor, memory := _Memory())
            self.report.saved_bytes += tensor.untyped_storage().nbytes()
        if self._pending is not None and not self._is_pending(memory):
            self._shrink_pending()
        is_lossy = self._lossy is not None and self._may_be_lossy(tensor, self._lossy)
        made = self._find_shared(tensor, memory, is_lossy=is_lossy) if memory.made else None
        is_plain = not tensor.is_conj() and not tensor.is_neg()
        is_whole = tensor.untyped_storage().nbytes() <= _MAX_SHARE * tensor.nbytes
        if made is None and tensor.nbytes >= self._min_bytes and is_plain and is_whole:
            if self._lossless and self._saves_signs(tensor):
                saved = Encoded(tensor, alias(tensor))
                self._pending = memory, stream_id(tensor.device), weakref.ref(saved)
                return saved
            encode, kind = self._choose(tensor, memory, is_lossy=is_lossy)
            made = self._encode(tensor, memory, encode, kind) if encode is not None else None
        return Encoded(tensor, made) if made is not None else self._leave(tensor, memory)

    def _may_be_lossy(self, tensor: Tensor, lossy: codecs.LossyFormat) -> bool:
        if is_exact_only() or not tensor.requires_grad or not (self._layers is None or self._layers.is_inside):
            return False
        base = base_of(tensor) if is_view(tensor) else None
        if (tensor if base is None else base).is_leaf:
            return False  # somebody else keeps its memory alive
        is_number = tensor.is_floating_point() and tensor.dtype.itemsize > codecs.encoded_itemsize(lossy)
        is_large = tensor.nbytes >= self._min_bytes and tensor.shape[-1:] != (1,)
        return is_number and is_large and not self._notes.is_exact(tensor) and not _is_input_of_checkpoint()

    def _find_shared(self, tensor: Tensor, memory: _Memory, *, is_lossy: bool) -> EncodedStorage | None:
        for made in memory.encodings(memory.state(tensor)):
            if made.kind != "signs" and (is_lossy or made.kind != self._lossy):
                return made if made.still_holds(tensor) else None
        return None

    def _choose(self, tensor: Tensor, memory: _Memory, *, is_lossy: bool) -> tuple[Encode | None, str]:
        if self._lossless:
            if tensor.dtype is torch.bool:
                return pack_mask, "mask"
            largest = self._notes.largest_index(tensor)
            if largest is not None:
                return partial(shrink_indices, largest=largest), "indices"
            if tensor.device.type == "cpu" and self._notes.may_be_two_valued(tensor):
                return pack_two_values, "two values"
        if is_lossy and self._lossy is not None and memory.whole_state != memory.state(tensor):
            return partial(encode_lossy, to=self._lossy, block_size=self._block_size), self._lossy
        return None, ""

    def _encode(self, tensor: Tensor, memory: _Memory, encode: Encode, kind: str) -> EncodedStorage | None:
        made = EncodedStorage(tensor, kind, memory.state(tensor), encode)
        try:
            if not made.make(tensor, self.hand_on):
                return None
        except torch.OutOfMemoryError:  # the tensor as it is needs no more
            return None
        memory.made = [weakref.ref(made), *map(weakref.ref, memory.encodings())]
        if kind == self._lossy and self.keeps_exact:
            elements = elements_of(alias(tensor))
            made.exact = lambda: elements if self.gives_exact else None
        self.report.kinds[kind] += 1
        self.report.kept_bytes += made.num_bytes
        return made

    # Of ReLU's own result its backward needs the signs only, but a convolution behind it saves the same tensor for its
    # values, and mostly does so next. So the result is kept as it is until something else is saved. That it is ReLU's
    # own save shows in the node, which has not got its result yet: that lasts to the end of this save, and as the
    # result was not made in place, nobody else has it before. Whoever saves the values later gets the signs given up,
    # but for values with a loss: rounded to zero, they would stop gradients that ReLU lets pass.

    def _saves_signs(self, tensor: Tensor) -> bool:
        """Whether a ReLU is saving its own result, and no other stage or hooks may want the values."""
        node = tensor.grad_fn
        if node is None or node.name() != "ReluBackward0" or version_of(tensor) != 0 or self._next is not None:
            return False
        hooks = innermost_hooks()
        return hooks is not None and hooks[0] == self._pack and not has_own_result(node)

    def _is_pending(self, memory: _Memory) -> bool:
        return self._pending is not None and self._pending[0] is memory

    def _shrink_pending(self) -> None:
        (memory, stream, reference), self._pending = self._pending or (None, 0, lambda: None), None
        saved = reference()
        if memory is None or saved is None or not isinstance(tensor := saved.source, Tensor):
            return
        with torch.no_grad(), without_autocast():
            # On another stream it may not be computed yet.
            made = self._encode(tensor, memory, pack_mask, "signs") if stream == stream_id(tensor.device) else None
        if made is not None:
            saved.source = made
        else:
            self._keep_whole(memory, tensor.untyped_storage().nbytes())

    def _leave(self, tensor: Tensor, memory: _Memory) -> StoredTensor | None:
        """Leave a tensor as it is; what was made of its memory before is given up for it."""
        handed = self.hand_on(tensor)
        memory.whole_state = memory.state(tensor)
        num_bytes = tensor.untyped_storage().nbytes()
        for made in memory.encodings(memory.whole_state) if memory.made else ():
            if made.dtype is not tensor.dtype:
                continue
            if handed is None:
                self.report.kept_bytes -= made.give_up(partial(elements_of, alias(tensor)))
            elif is_dense(tensor) and tensor.nbytes == num_bytes:  # else a part was taken
                self.report.kept_bytes -= made.give_up(lambda: flat_as_stored(handed.give()))
        self._keep_whole(memory, handed.num_bytes if handed is not None else num_bytes)
        return handed

    def _keep_whole(self, memory: _Memory, num_bytes: int) -> None:
        if self._is_pending(memory):
            self._pending = None
        if not memory.is_whole:
            memory.is_whole = True
            self.report.kept_bytes += num_bytes


def _is_input_of_checkpoint() -> bool:
    """Whether a checkpoint of PyTorch, which runs its layer again on its input, saves that."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_SAVING):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def gradient_cosine(stage: CompressionStage, loss: Tensor, parameters: Iterable[Tensor]) -> float:
    """Return the cosine between the exact gradient and the one that ``stage`` gives.

    Runs two backwards of the same graph. It stays usable, no ``.grad`` is touched, no random number is drawn. Hooks on
    tensors run, those on the accumulation of gradients (as of DDP) do not. Not for sharded parameters (FSDP), whose
    hooks move them, nor with reentrant checkpointing, and not for DDP with ``static_graph=True``.

    Args:
        stage: What compressed the graph of ``loss``, entered with ``stage.keeps_exact = True``.
        loss: A scalar, scaled as for the backward: gradients in float16 vanish otherwise.
        parameters: The gradient is that with respect to all of them together; those without one are left out.

    Returns:
        A number from -1 to 1. 0.0 if one gradient is zero, NaN if both are, or one is not finite.

    Raises:
        RuntimeError: If the run did not keep the exact numbers.
        ValueError: If no parameter requires a gradient.
    """
    if not stage.has_exact:
        raise RuntimeError(
            "gradient_cosine(stage) has no exact gradient to compare with: set stage.keeps_exact = True before the "
            "stage is entered."
        )
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        raise ValueError("gradient_cosine(parameters) must hold one that requires a gradient, got none.")
    stored = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    stage.gives_exact = True
    try:
        exact = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    finally:
        stage.gives_exact = False
    with torch.no_grad():
        sums = torch.zeros(3, device=loss.device)
        for one, other in zip(exact, stored, strict=True):
            if one is not None:  # an unused parameter has neither
                a, b = _numbers_of(one), _numbers_of(other)
                sums = sums + torch.stack([a @ b, a @ a, b @ b]).to(sums.device)
                del a, b  # before those of the next parameter are made
        product, exact_square, stored_square = sums.tolist()  # one wait for the device
    if exact_square == 0.0 or stored_square == 0.0:
        return math.nan if exact_square == stored_square else 0.0
    cosine: float = product / (exact_square**0.5 * stored_square**0.5)
    return cosine if cosine != cosine else max(-1.0, min(1.0, cosine))


def _numbers_of(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense().resolve_conj()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.reshape(-1).to(torch.float32 if gradient.device.type == "mps" else torch.float64)  # which has none
