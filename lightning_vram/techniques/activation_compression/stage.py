"""Save activations in fewer bytes: lossless where possible, with a bounded error where asked.

Lossless: bool masks and dropout's float masks as bits, indices of pools, sorts and maxima in the smallest integer type,
results of ReLU as bits if only ReLU saved them, one copy of what was saved several times. Gradients are bit-exact. With
a bounded error, for chosen layers: activations in bf16, fp8 or int8.

Cost: a Python call per operator and per saved tensor, and one pass over what is encoded and decoded. No gain: a ReLU in
front of a convolution, which saves the values anyway; what a ``torch.autograd.Function`` holds in attributes, what a
``torch.func`` transform saves, and what compiled code saves between its own operators. Memory that the model itself
keeps alive, such as a mask, is not freed: the bits are stored in addition. Tensors saved inside the user's own
saved-tensor hooks, entered after the stage, never reach it. A write that PyTorch does not see (NumPy, a custom kernel)
after a save does not reach the backward, as without the stage, and neither does a write to ``.data`` after the stage
was left; between two saves of one tensor it is noticed on the CPU only. ``grad_fn._saved_result`` of a ReLU shows ones
and zeros.
"""

import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core.hooks import SavedTensorStage, StoredTensor
from lightning_vram.core.layers import LayerSelection
from lightning_vram.core.tensors.codecs import LossyFormat
from lightning_vram.core.tensors.properties import ByStorage, StorageMemo, alias, storage_address
from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import hide_from_dynamo
from lightning_vram.private_names.torch import without_autocast
from lightning_vram.techniques.activation_compression.encoded_storage import (
    Encoded,
    EncodedStorage,
    ExactSwitch,
    elements_of,
    source_of_elements,
)
from lightning_vram.techniques.activation_compression.encoding_choice import (
    EncodingChoice,
    LossyPermission,
    check_compression,
    is_checkpoint,
)
from lightning_vram.techniques.activation_compression.value_notes import ValueNotes

_MAX_SHARE = 16  # a view of less than that part of its memory is left alone: it is a part of something else's buffer


@dataclass
class CompressionReport:
    """What one run saved for its backward. Memory that several tensors share counts once."""

    saved_bytes: int = 0
    """Bytes that plain autograd would have kept, parameters and buffers not counted."""
    kept_bytes: int = 0
    num_saved: int = 0
    """Tensors that autograd asked to keep."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Encodings by kind: ``"mask"``, ``"two values"``, ``"indices"``, ``"signs"``, and those with a loss."""


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
        self._lossy = lossy
        self._permission = LossyPermission(lossy, layers, min_bytes) if lossy is not None else None
        self._min_bytes = min_bytes
        self._notes = ValueNotes(notes_exact=lossy is not None)
        self._choice = EncodingChoice(self._notes, lossless=lossless, lossy=lossy, block_size=block_size)
        self._memo: StorageMemo[EncodedStorage] = StorageMemo()
        self._made_of: ByStorage[weakref.WeakSet[EncodedStorage]] = ByStorage()  # at any version of it
        self._counted: ByStorage[bool] = ByStorage()
        self._counted_whole: ByStorage[bool] = ByStorage()
        self._which = ExactSwitch()
        self._being_saved: Tensor | None = None  # by autograd, and not offered by another stage
        self._is_checkpointed = False
        self._keeps_exact = False
        self.has_exact = False
        """Whether the last run kept the exact numbers, too."""
        self.report = CompressionReport()

    @contextmanager
    def keeping_exact_too(self) -> Iterator[None]:
        """Let runs inside the block keep the exact numbers beside those with a loss: to compare gradients."""
        self._keeps_exact = True
        try:
            yield
        finally:
            self._keeps_exact = False

    @contextmanager
    def giving_exact(self) -> Iterator[None]:
        """Let backwards inside the block compute with the exact numbers, of runs that kept them."""
        self._which.is_exact = True
        try:
            yield
        finally:
            self._which.is_exact = False

    @override
    def begin(self, stack: ExitStack) -> OperatorSubscriber | None:
        self.report = CompressionReport()
        self.has_exact = self._keeps_exact
        stack.callback(self._clear)
        if self._permission is not None:
            stack.enter_context(self._permission.watching())
        self._notes.exact_values.lasting = frozenset(self._buffers)
        stack.enter_context(self._notes.notifying(self))
        stack.enter_context(self._notes)
        return self._notes

    @override
    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        self._being_saved = tensor
        self._is_checkpointed = self._lossy is not None and is_checkpoint(sys._getframe(1))
        try:
            return super()._pack(tensor)
        finally:
            self._being_saved = None
            self._is_checkpointed = False

    # What ValueNotes tells, from below autograd.

    def on_activation(self, result: Tensor) -> None:
        """Expect it to be saved next, if autograd would ask this stage for that."""
        self._choice.activation.note(result, self._pack)

    @hide_from_dynamo
    def on_exact_argument(self, tensor: Tensor) -> None:
        """Give up what was made of ``tensor`` with a loss."""
        num_writes = self._notes.num_writes(tensor)
        made = self._memo.find(tensor, ("lossy", num_writes, stream_id(tensor.device)))
        if made is not None and not made.is_given_up:
            with torch.no_grad(), without_autocast():
                self._leave(elements_of(alias(tensor)), num_writes)

    @hide_from_dynamo
    def on_write(self, target: Tensor) -> None:
        """Give up what was made of ``target``: plain autograd finds what is written there, or refuses it."""
        for made in self._made_of.find(target) or ():
            if not made.is_given_up:
                elements = torch.empty(0, dtype=made.dtype, device=target.device).set_(target.untyped_storage())
                self._give_up(made, lambda elements=elements: elements)  # type: ignore[misc]
                self._count_whole(target, target.untyped_storage().nbytes())

    @override
    def take(self, tensor: Tensor) -> StoredTensor | None:
        if not storage_address(tensor) or not tensor.numel():
            return self.hand_on(tensor)
        self.report.num_saved += 1
        if not self._counted.find(tensor):
            self._counted.note(tensor, True)  # noqa: FBT003
            self.report.saved_bytes += tensor.untyped_storage().nbytes()
        num_writes = self._notes.num_writes(tensor)
        is_lossy = self._may_be_lossy(tensor)
        if not is_lossy:
            self._choice.signs.note_values(tensor)
        if num_writes is not None:
            made = self._find_shared(tensor, num_writes, is_lossy=is_lossy)
            if made is not None:
                return Encoded(tensor, made)
        if tensor.nbytes >= self._min_bytes and self._is_whole_memory(tensor):
            made = self._encode(tensor, is_lossy=is_lossy)
            if made is not None:
                return Encoded(tensor, made)
        return self._leave(tensor, num_writes)

    def _clear(self) -> None:
        self._notes.clear()
        self._memo.clear()
        self._choice.end_run()
        self._made_of.clear()
        self._counted.clear()
        self._counted_whole.clear()

    def _is_whole_memory(self, tensor: Tensor) -> bool:
        is_plain = not tensor.is_conj() and not tensor.is_neg()
        return is_plain and tensor.untyped_storage().nbytes() <= _MAX_SHARE * tensor.nbytes

    def _may_be_lossy(self, tensor: Tensor) -> bool:
        if self._permission is None or self._is_checkpointed or not self._permission.allows(tensor):
            return False
        return tensor not in self._notes.exact_values

    def _find_shared(self, tensor: Tensor, num_writes: int, *, is_lossy: bool) -> EncodedStorage | None:
        for kind in ("lossless", "lossy") if is_lossy else ("lossless",):
            made = self._memo.find(tensor, (kind, num_writes, stream_id(tensor.device)))
            if made is not None and made.still_holds(tensor):
                return made
        return None

    def _encode(self, tensor: Tensor, *, is_lossy: bool) -> EncodedStorage | None:
        encode, kind = self._choice.choose(tensor, is_lossy=is_lossy, is_autograds=tensor is self._being_saved)
        if encode is None:
            return None
        try:
            encoding = encode(elements_of(tensor))
        except torch.OutOfMemoryError:  # the tensor as it is needs no more
            return None
        if encoding is None or sum(piece.nbytes for piece in encoding.pieces) >= tensor.untyped_storage().nbytes():
            return None
        made = EncodedStorage(tensor, encode, encoding, self.hand_on, is_exact=kind != self._lossy)
        self._note_made(tensor, made, kind)
        if kind == self._lossy and self._keeps_exact:
            made.keep_exact_too(alias(tensor), self._which)
        self.report.kinds[kind] += 1
        self.report.kept_bytes += made.num_bytes
        return made

    def _note_made(self, tensor: Tensor, made: EncodedStorage, kind: str) -> None:
        of_lossless = kind if kind == "signs" else "lossless"
        key = "lossy" if kind == self._lossy else of_lossless, self._notes.watch(tensor), stream_id(tensor.device)
        self._memo.note(tensor, made, key)
        of_memory = self._made_of.find(tensor)
        if of_memory is None:
            of_memory = weakref.WeakSet()
            self._made_of.note(tensor, of_memory)
        of_memory.add(made)

    def _leave(self, tensor: Tensor, num_writes: int | None) -> StoredTensor | None:
        """Leave a tensor as it is; what was made of its memory before is given up for it."""
        handed = self.hand_on(tensor)
        for kind in ("signs", "lossless", "lossy") if num_writes is not None else ():
            made = self._memo.find(tensor, (kind, num_writes, stream_id(tensor.device)))
            source = source_of_elements(tensor, handed) if made is not None else None
            if made is not None and source is not None and made.dtype is tensor.dtype:
                self._give_up(made, source)
        if self._lossy is not None:
            self._choice.wholes.note(tensor, tensor.untyped_storage(), self._notes.watch(tensor))
        self._count_whole(tensor, handed.num_bytes if handed is not None else tensor.untyped_storage().nbytes())
        return handed

    def _give_up(self, made: EncodedStorage, source: Callable[[], Tensor]) -> None:
        self.report.kept_bytes -= made.num_bytes
        made.replace(source)

    def _count_whole(self, tensor: Tensor, num_bytes: int) -> None:
        if not self._counted_whole.find(tensor):
            self._counted_whole.note(tensor, True)  # noqa: FBT003
            self.report.kept_bytes += num_bytes


def gradient_cosine(stage: CompressionStage, loss: Tensor, parameters: Iterable[Tensor]) -> float:
    """Return the cosine between the exact gradient and the one that ``stage`` gives.

    The same graph is run backward twice, with the exact numbers and with the stored ones: it costs two backwards and,
    for that batch, the memory of the exact numbers. The graph stays usable, no ``.grad`` is touched, no random number
    is drawn. Hooks on tensors run, those on the accumulation of gradients (as of DDP) do not. Not for sharded
    parameters (FSDP), whose hooks move them, nor with reentrant checkpointing, and not for DDP with
    ``static_graph=True``, which counts the backwards.

    Args:
        stage: What compressed the graph of ``loss``, entered within
            :meth:`~lightning_vram.techniques.activation_compression.stage.CompressionStage.keeping_exact_too`.
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
            "gradient_cosine(stage) has no exact gradient to compare with: enter the stage inside "
            "stage.keeping_exact_too()."
        )
    wanted = [parameter for parameter in parameters if parameter.requires_grad]
    if not wanted:
        raise ValueError("gradient_cosine(parameters) must hold one that requires a gradient, got none.")
    stored = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    with stage.giving_exact():
        exact = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
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
