"""Keep what autograd saves in fewer bytes: without any loss where that is possible, with a bounded one where asked.

Without loss: bool masks and the float masks of dropout as bits, indices of pools, sorts and maxima in the narrowest
integer, the results of ReLU as bits where only ReLU saved them, one copy of what was saved several times. Gradients
are equal to the last bit. With a bounded loss, for chosen layers: activations in bf16, fp8 or int8.

What it costs: a Python call per operator and per saved tensor, and a pass over what is encoded and decoded. Where it
does not help: a ReLU in front of a convolution, which keeps the values anyway; what a ``torch.autograd.Function``
hides in attributes, what a ``torch.func`` transform saves, and what compiled code keeps between its own operators.
Values that PyTorch cannot know to be written (by a kernel of one's own, on a GPU) between two saves of one tensor are
taken for unwritten. ``grad_fn._saved_result`` of a ReLU shows ones and zeros.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_vram.memory.checks import check_positive_int
from lightning_vram.techniques.encoded_storage import (
    Encode,
    Encoded,
    EncodedStorage,
    WhichGiven,
    elements_of,
    fills_its_memory,
)
from lightning_vram.techniques.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.techniques.layer_selection import LayerSelection
from lightning_vram.techniques.learned_signs import LearnedSigns
from lightning_vram.techniques.lossless_codecs import (
    Encoding,
    narrow_indices,
    pack_mask,
    pack_signs,
    pack_two_values,
)
from lightning_vram.techniques.lossy_codecs import LOSSY_FORMATS, LossyFormat, decode, encode, encoded_itemsize
from lightning_vram.techniques.running_layers import RunningLayers
from lightning_vram.techniques.saved_tensor_stage import SavedTensorStage, Taken
from lightning_vram.techniques.sign_savers import find_sign_condition
from lightning_vram.techniques.storage_memo import StorageMemo
from lightning_vram.techniques.value_notes import ValueNotes
from lightning_vram.techniques.versions import alias, storage_address

_MAX_SHARE = 16  # a view of less than that part of its memory is left alone: it is a part of something else's buffer
_LOSSY_DTYPES = frozenset([torch.float64, torch.float32, torch.float16, torch.bfloat16])


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
    custom functions put aside), second results and statistics of operators, what is made of weights only, and
    tensors whose last size is 1.

    Args:
        module: Its parameters and buffers stay alive anyway.
        lossless: Whether to do what changes no gradient.
        lossy: How to store the other activations of ``layers``: ``"bf16"``, ``"fp8"`` (e4m3) or ``"int8"``; ``None``:
            as they are. See :func:`~lightning_vram.techniques.lossy_codecs.encode` for the error.
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
        _check_arguments(lossy, layers, block_size, min_bytes)
        self._lossless = lossless
        self._lossy = lossy
        self._layers = RunningLayers(_modules_of(layers)) if layers is not None else None
        self._block_size = block_size
        self._min_bytes = min_bytes
        self._notes = ValueNotes(notes_exact=lossy is not None)
        self._signs = LearnedSigns()
        self._memo: StorageMemo[EncodedStorage] = StorageMemo()
        self._wholes: StorageMemo[torch.UntypedStorage] = StorageMemo()  # kept as they are
        self._counted: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._counted_whole: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._which = WhichGiven()
        self._being_saved: Tensor | None = None  # by autograd, and not offered by another stage
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
    def begin(self, stack: ExitStack) -> TorchDispatchMode | None:
        self.report = CompressionReport()
        self.has_exact = self._keeps_exact
        stack.callback(self._clear)
        if self._layers is not None:
            stack.enter_context(self._layers.watching())
        stack.enter_context(self._notes)
        return self._notes

    @override
    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        self._being_saved = tensor
        try:
            return super()._pack(tensor)
        finally:
            self._being_saved = None

    @override
    def take(self, tensor: Tensor) -> Taken | None:
        if not storage_address(tensor):
            return self.hand_on(tensor)
        self.report.num_saved += 1
        if _is_first(self._counted, tensor):
            self.report.saved_bytes += tensor.untyped_storage().nbytes()
        num_writes = self._notes.num_writes(tensor)
        is_lossy = self._lossy is not None and self._may_be_lossy(tensor)
        if not is_lossy:
            self._signs.note_values(tensor)
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
        self._signs.end_run()
        self._wholes.clear()
        self._counted.clear()
        self._counted_whole.clear()

    def _is_whole_memory(self, tensor: Tensor) -> bool:
        is_plain = not tensor.is_conj() and not tensor.is_neg()
        return is_plain and tensor.untyped_storage().nbytes() <= _MAX_SHARE * tensor.nbytes

    def _may_be_lossy(self, tensor: Tensor) -> bool:
        assert self._lossy is not None
        if self._layers is not None and not self._layers.is_inside:
            return False
        if not tensor.requires_grad or tensor.dtype not in _LOSSY_DTYPES or tensor.nbytes < self._min_bytes:
            return False
        if tensor.dtype.itemsize <= encoded_itemsize(self._lossy) or tensor.shape[-1:] == (1,):
            return False
        return not self._notes.is_exact(tensor)

    def _find_shared(self, tensor: Tensor, num_writes: int, *, is_lossy: bool) -> EncodedStorage | None:
        for kind in ("lossless", "lossy") if is_lossy else ("lossless",):
            made = self._memo.find(tensor, (kind, num_writes))
            if made is not None and made.still_holds(tensor):
                return made
        return None

    def _encode(self, tensor: Tensor, *, is_lossy: bool) -> EncodedStorage | None:
        encode, kind = self._choose(tensor, is_lossy=is_lossy)
        if encode is None:
            return None
        try:
            encoding = encode(elements_of(tensor))
        except torch.OutOfMemoryError:  # the tensor as it is needs no more
            return None
        if encoding is None:
            return None
        made = EncodedStorage(tensor, encode, encoding, self.hand_on)
        of_lossless = kind if kind == "signs" else "lossless"
        self._memo.note(tensor, made, ("lossy" if kind == self._lossy else of_lossless, self._notes.watch(tensor)))
        if kind == self._lossy and self._keeps_exact:
            made.keep_exact_too(alias(tensor), self._which)
        self.report.kinds[kind] += 1
        self.report.kept_bytes += made.num_bytes
        return made

    def _choose(self, tensor: Tensor, *, is_lossy: bool) -> tuple[Encode | None, str]:
        if self._lossless:
            if tensor.dtype is torch.bool:
                return pack_mask, "mask"
            largest = self._notes.largest_index(tensor)
            if largest is not None:
                return partial(narrow_indices, largest=largest), "indices"
            # Another stage may read the values of what it hands on.
            condition = find_sign_condition(tensor) if tensor is self._being_saved else None
            if condition is not None and not self._signs.was_asked(tensor):
                is_worth_it = self._signs.is_worth_it(tensor) or is_lossy  # then nobody else keeps the values
                return (partial(pack_signs, condition=condition) if is_worth_it else None), "signs"
            if self._notes.may_be_two_valued(tensor) and tensor.device.type == "cpu":
                return pack_two_values, "two values"
        if is_lossy and self._lossy is not None and self._wholes.find(tensor, self._notes.watch(tensor)) is None:
            return partial(_encode_lossy, to=self._lossy, block_size=self._block_size), self._lossy
        return None, ""

    def _leave(self, tensor: Tensor, num_writes: int | None) -> Taken | None:
        """Leave a tensor as it is; what was made of its memory before is given up for it."""
        handed = self.hand_on(tensor)
        if num_writes is not None:
            for kind in ("signs", "lossless", "lossy"):
                made = self._memo.find(tensor, (kind, num_writes))
                source = _source_of_elements(tensor, handed) if made is not None else None
                if made is not None and source is not None and made.dtype is tensor.dtype:
                    self.report.kept_bytes -= made.num_bytes
                    made.replace(source)
        if self._lossy is not None:
            self._wholes.note(tensor, tensor.untyped_storage(), self._notes.watch(tensor))
        if _is_first(self._counted_whole, tensor):
            self.report.kept_bytes += handed.num_bytes if handed is not None else tensor.untyped_storage().nbytes()
        return handed


def _encode_lossy(numbers: Tensor, to: LossyFormat, block_size: int) -> Encoding:
    dtype, size = numbers.dtype, numbers.numel()
    return Encoding(encode(numbers, to, block_size), lambda pieces: decode(pieces, to, dtype, size))


def _source_of_elements(tensor: Tensor, handed: Taken | None) -> Callable[[], Tensor] | None:
    """Return a function that returns all elements of the memory of ``tensor``, which stays, or was taken."""
    if handed is None:
        elements = elements_of(alias(tensor))
        return lambda: elements
    size = tensor.numel()
    if not fills_its_memory(tensor):
        return None  # a part, from which the rest cannot be had

    def give() -> Tensor:
        given = handed.give()
        return given.as_strided((size,), (1,), given.storage_offset())

    return give


def _is_first(seen: dict[int, "weakref.ref[torch.UntypedStorage]"], tensor: Tensor) -> bool:
    address = storage_address(tensor)
    known = seen.get(address)
    if known is not None and known() is not None:
        return False
    seen[address] = weakref.ref(tensor.untyped_storage())
    return True


def _modules_of(layers: LayerSelection | Sequence[nn.Module]) -> list[nn.Module]:
    if not isinstance(layers, LayerSelection):
        return list(layers)
    modules: list[nn.Module] = []
    for layer in layers.layers:
        modules += list(layer.module.children())[slice(*layer.span)] if layer.span is not None else [layer.module]
    return modules


def _check_arguments(lossy: object, layers: object, block_size: object, min_bytes: object) -> None:
    if lossy is not None and lossy not in LOSSY_FORMATS:
        raise ValueError(f"CompressionStage(lossy) must be 'bf16', 'fp8', 'int8' or None, got {lossy!r}.")
    if layers is not None and lossy is None:
        raise ValueError(
            "CompressionStage(layers) says where to store with a loss, and lossy=None says not to. "
            "Set lossy to 'bf16', 'fp8' or 'int8', or leave layers out."
        )
    if not isinstance(layers, LayerSelection | None):
        for layer in layers if isinstance(layers, Sequence) else [layers]:
            if not isinstance(layer, nn.Module):
                raise TypeError(
                    "CompressionStage(layers) must be modules, such as select_layers() finds them by name, "
                    f"got {layer!r} of type {type(layer).__name__}."
                )
    check_positive_int("CompressionStage(block_size)", block_size)
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool):
        raise TypeError(
            f"CompressionStage(min_bytes) must be an int, got {min_bytes!r} of type {type(min_bytes).__name__}."
        )
    if min_bytes < 0:
        raise ValueError(f"CompressionStage(min_bytes) must not be negative, got {min_bytes}.")
