"""Save activations in fewer bytes: lossless where possible, with a bounded error where asked.

Lossless: bool masks and dropout's float masks as bits, indices of pools, sorts and maxima in the smallest integer type,
results of ReLU as bits if only ReLU saved them, one copy of what was saved several times. Gradients are bit-exact. With
a bounded error, for chosen layers: activations in bf16, fp8 or int8.

Cost: a Python call per operator and per saved tensor, and one pass over what is encoded and decoded. No gain: a ReLU in
place, or in front of a convolution, which saves the values anyway; what a ``torch.autograd.Function`` holds in
attributes, what a ``torch.func`` transform saves, and what compiled code saves between its own operators. Memory that
the model itself keeps alive, such as a mask, is not freed: the bits are stored in addition. Tensors saved inside the
user's own saved-tensor hooks, entered after the stage, never reach it. A write that PyTorch does not see (NumPy, a
custom kernel) after a save does not reach the backward, and neither does a write to ``.data`` after the stage was left;
between two saves of one tensor it is noticed on the CPU only. ``grad_fn._saved_result`` of a ReLU shows ones and zeros.
"""

import math
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

from lightning_vram.core.hooks import SavedTensorStage, StoredTensor, hide_from_dynamo
from lightning_vram.core.layers import LayerSelection
from lightning_vram.core.tensors.codecs import LossyFormat
from lightning_vram.core.tensors.properties import (
    ByStorage,
    alias,
    flat_as_stored,
    is_dense,
    storage_address,
    version_of,
)
from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.private_names.dispatcher import TorchDispatchMode
from lightning_vram.private_names.torch import has_own_result, innermost_hooks, without_autocast
from lightning_vram.techniques.activation_compression.encoded_storage import (
    Encode,
    Encoded,
    EncodedStorage,
    PendingSigns,
    elements_of,
    encode_lossy,
    pack_mask,
    pack_signs,
    pack_two_values,
    shrink_indices,
)
from lightning_vram.techniques.activation_compression.lossy_permission import LossyPermission, check_compression
from lightning_vram.techniques.activation_compression.value_notes import ValueNotes

_MAX_SHARE = 16  # a view of less than that part of its memory is left alone: it is a part of something else's buffer


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

    num_writes: int = 0  # that were seen since, also those that autograd does not count
    made: list[weakref.ref[EncodedStorage]] = field(default_factory=list)  # of it, in any state
    whole_state: Any = None  # in which it was left as it is
    is_whole: bool = False  # counted in full

    def state(self, tensor: Tensor) -> tuple[int, int, int]:
        """Return what changes with the numbers in this memory, which ``tensor`` lies in, and with who can read them."""
        return version_of(tensor), self.num_writes, stream_id(tensor.device)

    def encodings(self) -> list[EncodedStorage]:
        """Return those in use, the newest first."""
        found = [reference() for reference in reversed(self.made)]
        return [made for made in found if made is not None and not made.is_given_up]


class CompressionStage(SavedTensorStage):
    """Keeps saved tensors in fewer bytes while it is entered.

    It keeps what it makes, or hands it on to the next stage; so it does with tensors it leaves as they are. With a
    loss it stores results and inputs of operators that have a gradient; never what has none (data, constants, what
    custom functions put aside), leaves, second results and statistics of operators, what is made of those or of weights
    only, what the backward of an operator magnifies an error of (see
    :mod:`~lightning_vram.core.operators`), inputs of checkpoints, and tensors whose last size is 1.
    Differences of nearly equal terms, as in a softmax made of ``exp`` and ``sum``, magnify an error that no operator
    shows.

    Args:
        module: Its parameters and buffers stay alive anyway.
        lossless: Whether to do what changes no gradient.
        lossy: How to store the other activations of ``layers``: ``"bf16"``, ``"fp8"`` (e4m3) or ``"int8"``; ``None``:
            as they are. See ``encode`` for the error.
        layers: Modules, or a selection; what is saved in their forwards is stored as ``lossy`` says. ``None``: all
            that is saved.
        block_size: Neighbours in memory that share a scale, for ``"fp8"`` and ``"int8"``.
        min_bytes: Smaller tensors are left as they are.

    Raises:
        TypeError: If ``block_size`` or ``min_bytes`` is not an ``int``, or ``layers`` holds what is no module.
        ValueError: If a number is too small, ``lossy`` is unknown, or ``layers`` are given without ``lossy``.

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
        lossy: LossyFormat | None = None,
        layers: LayerSelection | Sequence[nn.Module] | None = None,
        block_size: int = 128,
        min_bytes: int = 1024,
    ) -> None:
        super().__init__(module)
        check_compression(lossy, layers, block_size, min_bytes)
        self._lossless, self._lossy, self._block_size = lossless, lossy, block_size
        self._permission = LossyPermission(lossy, layers, min_bytes) if lossy is not None else None
        self._min_bytes = min_bytes
        self._notes = ValueNotes(notes_exact=lossy is not None)
        self._memories: ByStorage[_Memory] = ByStorage()
        self._pending: tuple[_Memory, int, weakref.ref[PendingSigns]] | None = None  # with stream
        self.keeps_exact = False
        """Whether runs keep the exact numbers beside those with a loss, for :func:`gradient_cosine`."""
        self.has_exact = False
        """Whether the last run did."""
        self.gives_exact = False
        """Whether backwards compute with the exact numbers, of runs that kept them."""
        self.report = CompressionReport()

    @override
    def begin(self, stack: ExitStack) -> TorchDispatchMode | None:
        self.report = CompressionReport()
        self.has_exact = self.keeps_exact
        stack.callback(self._clear)
        stack.callback(self._shrink_pending)
        if self._permission is not None:
            stack.enter_context(self._permission.watching())
        self._notes.exact_values.lasting = frozenset(self._buffers)
        self._notes.listener = self
        stack.enter_context(self._notes)
        return self._notes

    def _clear(self) -> None:
        self._notes.listener = None
        self._notes.clear()
        self._memories.clear()

    # What ValueNotes tells, from below autograd.

    @hide_from_dynamo
    def on_exact_argument(self, tensor: Tensor) -> None:
        """Give up what was made of ``tensor`` with a loss."""
        memory = self._memories.find(tensor)
        state = memory.state(tensor) if memory is not None else None
        if memory is not None and any(m.state == state and m.kind == self._lossy for m in memory.encodings()):
            with torch.no_grad(), without_autocast():
                self._leave(elements_of(alias(tensor)), memory)

    @hide_from_dynamo
    def on_write(self, target: Tensor, *, is_certain: bool) -> None:
        """Give up what was made of ``target``: plain autograd finds what is written there, or refuses it."""
        memory = self._memories.find(target)
        if memory is None:
            return
        self._keep_pending(memory, target, None)
        for made in memory.encodings() if is_certain else ():
            elements = torch.empty(0, dtype=made.dtype, device=target.device).set_(target.untyped_storage())
            self._give_up(made, lambda elements=elements: elements)  # type: ignore[misc]
            self._count_whole(memory, target.untyped_storage().nbytes())
        memory.num_writes += 1

    @override
    def take(self, tensor: Tensor) -> StoredTensor | None:
        if not storage_address(tensor) or not tensor.numel():
            return self.hand_on(tensor)
        memory = self._memories.find(tensor)
        if memory is None:
            self._memories.note(tensor, memory := _Memory())
            self.report.saved_bytes += tensor.untyped_storage().nbytes()
        if self._pending is not None and self._pending[0] is not memory:
            self._shrink_pending()
        is_lossy = (
            self._permission is not None
            and self._permission.allows(tensor)
            and tensor not in self._notes.exact_values
        )
        made = self._find_shared(tensor, memory, is_lossy=is_lossy) if memory.made else None
        if made is None and tensor.nbytes >= self._min_bytes and self._is_whole_memory(tensor):
            if self._lossless and self._saves_signs(tensor):
                signs = PendingSigns(tensor)
                self._pending = memory, stream_id(tensor.device), weakref.ref(signs)
                return signs
            encode, kind = self._choose(tensor, memory, is_lossy=is_lossy)
            made = self._encode(tensor, memory, encode, kind) if encode is not None else None
        return Encoded(tensor, made) if made is not None else self._leave(tensor, memory)

    def _is_whole_memory(self, tensor: Tensor) -> bool:
        is_plain = not tensor.is_conj() and not tensor.is_neg()
        return is_plain and tensor.untyped_storage().nbytes() <= _MAX_SHARE * tensor.nbytes

    def _find_shared(self, tensor: Tensor, memory: _Memory, *, is_lossy: bool) -> EncodedStorage | None:
        state = memory.state(tensor)
        for made in memory.encodings():
            if made.state == state and made.kind != "signs" and (is_lossy or made.kind != self._lossy):
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

    def _saves_signs(self, tensor: Tensor) -> bool:
        """Whether a ReLU is saving its own result, of which its backward asks the signs only.

        Its node has not got that result yet: that lasts to the end of this save, and nobody else has the tensor before,
        as it is not made in place. Other hooks, which may read the values, are not between autograd and this stage. If
        somebody saves the values as well, the signs are given up for those.
        """
        node = tensor.grad_fn
        if node is None or node.name() != "ReluBackward0" or version_of(tensor) != 0:
            return False
        hooks = innermost_hooks()
        return hooks is not None and hooks[0] == self._pack and not has_own_result(node)

    def _encode(self, tensor: Tensor, memory: _Memory, encode: Encode, kind: str) -> EncodedStorage | None:
        try:
            encoding = encode(elements_of(tensor))
        except torch.OutOfMemoryError:  # the tensor as it is needs no more
            return None
        if encoding is None or sum(piece.nbytes for piece in encoding.pieces) >= tensor.untyped_storage().nbytes():
            return None
        encoding = encoding._replace(pieces=[self.hand_on(piece) or piece for piece in encoding.pieces])
        made = EncodedStorage(tensor, kind, memory.state(tensor), encode, encoding)
        memory.made.append(weakref.ref(made))
        if kind == self._lossy and self.keeps_exact:
            elements = elements_of(alias(tensor))
            made.exact = lambda: elements if self.gives_exact else None
        self.report.kinds[kind] += 1
        self.report.kept_bytes += made.num_bytes
        return made

    def _shrink_pending(self) -> None:
        """Keep of ReLU's result the signs only: what is saved next is not its values."""
        if self._pending is None:
            return
        (memory, stream, reference), self._pending = self._pending, None
        signs = reference()
        if signs is not None and isinstance(signs.given, Tensor):
            tensor, made = signs.given, None
            if stream == stream_id(tensor.device):  # in another, it may not have been computed yet
                with torch.no_grad(), without_autocast():
                    made = self._encode(tensor, memory, pack_signs, "signs")
            if made is not None:
                signs.given = Encoded(tensor, made)
            else:
                self._count_whole(memory, tensor.untyped_storage().nbytes())

    def _keep_pending(self, memory: _Memory, tensor: Tensor, handed: StoredTensor | None) -> None:
        """Let ReLU's result be ``tensor``, which is on this memory: it stays, or was taken."""
        if self._pending is None or self._pending[0] is not memory:
            return
        signs = self._pending[-1]()
        given = signs.given if signs is not None else None
        if handed is None:
            self._count_whole(memory, tensor.untyped_storage().nbytes())
        elif isinstance(given, Tensor) and (given.shape, given.stride()) != (tensor.shape, tensor.stride()):
            self._shrink_pending()
        elif signs is not None:
            signs.given = handed
        self._pending = None

    def _leave(self, tensor: Tensor, memory: _Memory) -> StoredTensor | None:
        """Leave a tensor as it is; what was made of its memory before is given up for it."""
        handed, state = self.hand_on(tensor), memory.state(tensor)
        self._keep_pending(memory, tensor, handed)
        for made in memory.encodings():
            source = _source_of_elements(tensor, handed) if made.state == state else None
            if source is not None and made.dtype is tensor.dtype:
                self._give_up(made, source)
        memory.whole_state = state
        self._count_whole(memory, handed.num_bytes if handed is not None else tensor.untyped_storage().nbytes())
        return handed

    def _give_up(self, made: EncodedStorage, source: Callable[[], Tensor]) -> None:
        self.report.kept_bytes -= made.num_bytes
        made.give_up(source)

    def _count_whole(self, memory: _Memory, num_bytes: int) -> None:
        if not memory.is_whole:
            memory.is_whole = True
            self.report.kept_bytes += num_bytes


def _source_of_elements(tensor: Tensor, handed: StoredTensor | None) -> Callable[[], Tensor] | None:
    """Return a function that returns all elements of the memory of ``tensor``, which stays, or was taken."""
    if handed is None:
        kept = alias(tensor)
        return lambda: elements_of(kept)
    is_all = is_dense(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()
    return (lambda: flat_as_stored(handed.give())) if is_all else None  # else a part is left


def gradient_cosine(stage: CompressionStage, loss: Tensor, parameters: Iterable[Tensor]) -> float:
    """Return the cosine between the exact gradient and the one that ``stage`` gives.

    The same graph is run backward twice, with the exact numbers and with the stored ones: it costs two backwards and,
    for that batch, the memory of the exact numbers. The graph stays usable, no ``.grad`` is touched, no random number
    is drawn. Hooks on tensors run, those on the accumulation of gradients (as of DDP) do not. Not for sharded
    parameters (FSDP), whose hooks move them, nor with reentrant checkpointing, and not for DDP with
    ``static_graph=True``, which counts the backwards.

    Args:
        stage: What compressed the graph of ``loss``, entered with ``stage.keeps_exact = True``.
        loss: A scalar, scaled as for the backward: gradients in float16 vanish otherwise.
        parameters: The gradient is that with respect to all of them together; those without one are left out.

    Returns:
        A number from -1 to 1. 0.0 if one gradient is zero, NaN if both are, or one is not finite. The parts of complex
        numbers count as numbers.

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
        sums = torch.zeros(3, dtype=_widest(loss.device), device=loss.device)
        for one, other in zip(exact, stored, strict=True):
            if one is not None:  # an unused parameter has neither
                sums += _products(one, other).to(sums.device)
        product, exact_square, stored_square = sums.tolist()  # one wait for the device
    if exact_square == 0.0 or stored_square == 0.0:
        return math.nan if exact_square == stored_square else 0.0
    cosine = product / (exact_square**0.5 * stored_square**0.5)
    return cosine if cosine != cosine else max(-1.0, min(1.0, float(cosine)))


def _products(one: Tensor, other: Tensor) -> Tensor:
    a, b = _numbers_of(one), _numbers_of(other)  # gone before those of the next parameter are made
    return torch.stack([a @ b, a @ a, b @ b])


def _numbers_of(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense().resolve_conj()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.reshape(-1).to(_widest(gradient.device))


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which has no float64
