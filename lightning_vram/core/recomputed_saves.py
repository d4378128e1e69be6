"""What autograd saves in a call that is recomputed in the backward: placeholders, which the recomputation fills.

The rules are those of ``torch.utils.checkpoint`` (not reentrant), and the two nest in any order. Its hooks take some 25
Python calls for each saved tensor; these take three, and leave the ambient state to the caller. It compares shapes and
dtypes, so a layer that draws from an untracked generator passes, with gradients of a network that never ran; outputs
would not show that where a branch starts at zero (LoRA's B, LayerScale). Here some elements of each saved tensor are
compared, up to rounding: kernels with atomic additions are not bit-exact twice.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError
from typing_extensions import override

from lightning_vram.core.hooks import OwnHooks, may_be_unfinished
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, REAL_TYPES, is_strided
from lightning_vram.memory.storages import storage_address
from lightning_vram.private_names import torch as private
from lightning_vram.private_names.dispatcher import hide_from_dynamo, without_dispatch

_NUM_SAMPLES = 256
_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 5e-2}  # of the largest sample
_TOLERANCE = 1e-3
_FLOATING = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool}
)
_COMPARED = _FLOATING | {torch.int16, torch.int32, torch.int64}  # what can be compared on every device


class RecomputationError(RuntimeError):
    """A recomputation differs from the forward."""


def divergence_error(name: str, reason: str, way_out: str) -> RecomputationError:
    """Return the error for a layer: ``reason`` says what differs, ``way_out`` what to do, in sentences."""
    return RecomputationError(
        f"recomputation of layer {name} diverged from the forward: {reason} Gradients would be wrong. Does the layer "
        "use a random number generator other than the global ones of torch, Python and NumPy, or a value that changes "
        f"between forward and backward? {way_out}"
    )


def is_due(number: int) -> bool:
    """Whether the call of this number (from 1) is compared: 1, 2, 4, 8, ...: also after a branch has left zero."""
    return number & (number - 1) == 0


class SavedSamples:
    """Samples of what autograd saves in one run of a layer with these buffers; ``first``: those of the forward.

    Buffers change, and integers that are no indices (a seed of attention, cuDNN's workspace) may be unset: left out.
    """

    def __init__(self, buffers: Iterable[Tensor] = (), first: "SavedSamples | None" = None) -> None:
        self._buffers: set[int] = {storage_address(one) for one in buffers} - {0}
        self._first = first
        self._samples: list[Tensor | None] = []
        self._pending: list[tuple[int, Tensor]] = []  # of the operator that is about to write them
        self._operator = -1

    def take(self, tensor: Tensor) -> None:
        """Take a sample of a tensor that is being saved."""
        if self._pending and private.num_nodes() != self._operator:
            self.settle()
        is_pending = may_be_unfinished(tensor)
        if is_pending:
            self._operator = private.num_nodes()
            self._pending.append((len(self._samples), tensor))
        self._samples.append(None if is_pending else self._sample(tensor))

    def settle(self) -> None:
        """Take the samples that had to wait until their operator had finished."""
        for place, tensor in self._pending:
            self._samples[place] = self._sample(tensor)
        self._pending.clear()

    def difference(self) -> str | None:
        """Return a sentence on the first tensor whose values differ from those in the forward."""
        self.settle()
        assert self._first is not None
        numbered = enumerate(zip(self._first._samples, self._samples, strict=False), 1)
        pairs = [(number, one, other) for number, (one, other) in numbered if one is not None and other is not None]
        with without_dispatch(), torch.no_grad():
            if _are_equal([(one, other) for _, one, other in pairs]):
                return None
            number = next((number for number, one, other in pairs if not is_close(one, other)), None)
        return None if number is None else f"Saved tensor {number} has other values."

    def _sample(self, tensor: Tensor) -> Tensor | None:
        base = private.base_of(tensor) if private.is_view(tensor) else tensor
        is_compared = tensor.dtype in _FLOATING or tensor.dim() > 0
        if not is_compared or type(base) in PARAMETER_CLASSES or storage_address(tensor) in self._buffers:
            return None
        return take_sample(tensor)


def take_sample(tensor: Any) -> Tensor | None:
    """Return some elements of a tensor, at equal distances; ``None`` if it has none that can be compared."""
    is_plain = type(tensor) in REAL_TYPES and is_strided(tensor)
    if not is_plain or tensor.is_meta or tensor.numel() == 0 or tensor.dtype not in _COMPARED:
        return None
    distance = -(-tensor.numel() // _NUM_SAMPLES) | 1  # odd: not always in the same column
    with without_dispatch(), torch.no_grad():
        one: Tensor = tensor.detach()
        if one.is_contiguous():
            return one.view(-1)[::distance].clone()
        return one.take(torch.arange(0, one.numel(), distance, device=one.device))  # without a copy of the whole


def is_close(one: Tensor, other: Tensor | None) -> bool:
    """Whether two samples are equal up to rounding."""
    if other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    magnitudes = one.abs()[torch.isfinite(one)]
    scale = float(magnitudes.max()) if magnitudes.numel() else 0.0
    tolerance = _TOLERANCES.get(one.dtype, _TOLERANCE)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _are_equal(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Whether all are bitwise identical. Waits for the device once per dtype."""
    kinds: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for one, other in pairs:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        kinds.setdefault((one.dtype, one.device), []).append((one, other))
    return all(torch.equal(*map(torch.cat, zip(*group, strict=True))) for group in kinds.values())


_NOT_IN_BACKWARD = -1
_NOT_COUNTED = -1

_Kind = tuple[torch.Size, torch.dtype, torch.device, int]
"""Of a saved tensor: what it is, and how often it was written if it is a parameter, or a view of one."""


class Placeholder(dict[Any, Tensor]):
    """Placeholder of a saved tensor: the recomputed tensor, by the backward that it is for."""

    __slots__ = ("__weakref__",)


class RecomputedSaves(OwnHooks):
    """What autograd saves in one call; as a context manager, its forward.

    The first tensor that a backward asks for starts the recomputation, once for each backward. Each tensor is returned
    once and then dropped, even if the graph is retained. A backward inside of the call finds what was saved so far.

    ``run_again`` repeats the call with the hooks that it gets set around the forward. ``places`` gets a reference for
    each saved tensor, in order; autograd holds the placeholders. ``difference`` makes an error of a sentence.
    ``compares_kinds``: shapes, dtypes and devices must be equal. ``stops_early``: end with the last tensor that the
    forward saved. ``samples``: of the forward, if values are compared.
    """

    def __init__(
        self,
        run_again: Callable[["RecomputationHooks"], None],
        places: list[ref[Placeholder]],
        difference: Callable[[str], Exception],
        *,
        compares_kinds: bool,
        stops_early: bool,
        samples: SavedSamples | None = None,
    ) -> None:
        private.hide_warning_of_hooks()
        self.places = places
        self.kinds: list[_Kind] = []
        self.is_complete = False  # whether the first run is over: to be set
        self.compares_kinds, self.stops_early, self.samples = compares_kinds, stops_early, samples
        self._run_again, self._difference = run_again, difference
        self._filled: set[Any] = set()

    @override
    @hide_from_dynamo
    def pack_hook(self, tensor: Tensor) -> Placeholder:
        place = Placeholder()
        self.places.append(ref(place))
        is_parameter = type(tensor) in PARAMETER_CLASSES or type(private.base_of(tensor)) in PARAMETER_CLASSES
        num_written = private.num_writes(tensor) if is_parameter else _NOT_COUNTED
        self.kinds.append((tensor.shape, tensor.dtype, tensor.device, num_written))
        if self.samples is not None:
            self.samples.take(tensor)
        return place

    @override
    @hide_from_dynamo
    def unpack_hook(self, packed: Placeholder) -> Tensor:
        backward: Any = private.current_graph_group()  # several backwards that count as one
        if backward is None:
            backward = private.current_graph_task_id()
            if backward == _NOT_IN_BACKWARD:
                backward = object()  # nothing is saved for later reads
        if backward not in self._filled:
            self._fill(backward)
        if backward not in packed:
            raise CheckpointError("a recomputed tensor was read twice in the backward. Read ctx.saved_tensors once.")
        return packed.pop(backward)

    def _fill(self, backward: Any) -> None:
        second = RecomputationHooks(self, backward)
        with suppress(private.StopRecomputation), torch.enable_grad():
            self._run_again(second)
        self._filled.add(backward)
        difference = second.difference()
        if difference is not None:
            raise self._difference(difference)


class RecomputationHooks(OwnHooks):
    """The hooks of one recomputation, for one backward; it ends when the operator of the last save has finished."""

    def __init__(self, saves: RecomputedSaves, backward: Any) -> None:
        self._saves, self._backward = saves, backward
        self._number = 0  # of saved tensors
        # Operators: one that saves such noise, and the one that has to come to its end.
        self._unfinished = self._last = -1
        self._difference: str | None = None
        self._ignores_number = False
        self._samples = SavedSamples(first=saves.samples) if saves.samples is not None else None

    @override
    @hide_from_dynamo
    def pack_hook(self, tensor: Tensor) -> Tensor:  # noqa: C901 - once for each saved tensor, without a further call
        saves, number = self._saves, self._number
        if self._last != -1 and private.num_nodes() == self._last:
            return tensor.detach()  # else a result would hold its own node
        if number >= len(saves.places):
            return self._pack_more(tensor)
        self._number = number + 1
        if self._samples is not None:
            self._samples.take(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        elif type(tensor) not in PARAMETER_CLASSES and not private.is_view(tensor):
            self._unfinished = private.num_nodes()
        place = saves.places[number]()
        if place is not None:  # else autograd has let go of it, after a backward inside of the call
            place[self._backward] = tensor
            was = saves.kinds[number]
            num_written = private.num_writes(tensor) if was[-1] != _NOT_COUNTED else _NOT_COUNTED
            now = (tensor.shape, tensor.dtype, tensor.device, num_written)
            if saves.compares_kinds and was != now:
                text = f"was {_describe(*was)} and is {_describe(*now)}"
                if was[:-1] == now[:-1]:
                    text = "is a parameter that was modified by an inplace operation: write it after the backward"
                self._difference = self._difference or f"Saved tensor {number + 1} {text}."
        if saves.stops_early and number + 1 == len(saves.places):
            self._last = private.num_nodes()
            if self._last != self._unfinished:
                raise private.StopRecomputation
        return tensor

    @override
    @hide_from_dynamo
    def unpack_hook(self, packed: Tensor) -> Tensor:
        return packed

    def difference(self) -> str | None:
        """Return what differs from the forward, as far as it can be seen here."""
        expected = len(self._saves.places)
        if self._number == expected or self._ignores_number:
            is_sampled = self._difference is None and self._samples is not None
            return self._samples.difference() if is_sampled else self._difference  # type: ignore[union-attr]
        return (
            f"A different number of tensors was saved: {expected} in the forward, "
            f"{'more' if self._number > expected else self._number} in the recomputation."
        )

    def _pack_more(self, tensor: Tensor) -> Tensor:
        saves = self._saves
        if not (saves.stops_early or saves.is_complete):  # of a backward inside of the call: the rest of it comes now
            self._ignores_number = True
            return tensor.detach()
        if not saves.stops_early:
            self._number += 1
        raise private.StopRecomputation


def _describe(shape: torch.Size, dtype: torch.dtype, device: torch.device, num_written: int) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
