"""Drop every activation that is cheap to make again; make it again in the backward, to the bit.

A dispatch mode sees every operator below autograd and autocast, in any eager model: ``F.relu``, ``+``, casts, code
inside custom functions. For each result of a cheap operator it notes how it was made. When autograd saves a tensor,
a hook looks whether it can be made again from tensors that are kept anyway, and drops it if that saves bytes. The
backward of autograd stays what it is; it is handed the same numbers, so gradients are equal to the last bit, double
backward included.

What it costs: some Python per operator of the forward (see ``tests/benchmarks``), and the cheap operators a second
time. Where it does not help: matrix products, convolutions and attention keep their inputs; what a
``torch.autograd.Function`` hides in attributes, what a ``torch.func`` transform saves, and compiled code are left
alone.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.stage import SavedTensorStage, Taken, pack_in_place, unpack
from lightning_vram.core.hooks.unfinished_saves import saving
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES, PLAIN_TYPES
from lightning_vram.core.tensors.shards import is_sharded
from lightning_vram.core.tensors.versions import (
    alias,
    is_strided,
    storage_address,
)
from lightning_vram.private_names.torch.autocast import without_autocast
from lightning_vram.private_names.torch.dispatch import TorchDispatchMode, without_dispatch
from lightning_vram.private_names.torch.tensors import base_of, is_view, num_writes
from lightning_vram.techniques.in_place_fusion.recomputation.costs import HoldingCosts
from lightning_vram.techniques.in_place_fusion.recomputation.kept import Kept, KeptElsewhere, KeptMask
from lightning_vram.techniques.in_place_fusion.recomputation.notes import COPIED_BYTES
from lightning_vram.techniques.in_place_fusion.recomputation.rebuilding import find_sources, gives_same_bits, restore
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import Dropped, MaskValue, Value
from lightning_vram.techniques.in_place_fusion.recomputation.recorder import RecipeRecorder

_MAX_SHAPES = 16  # tried to the bit for one recipe, before all others are trusted


@dataclass
class RecomputationReport:
    """What one run saved for its backward."""

    dropped_bytes: int = 0
    """Bytes that plain autograd would have kept and that will be made again. Each tensor counts once."""
    kept_bytes: int = 0
    """Bytes kept, those that recipes end on included; parameters and buffers are not."""
    num_saved: int = 0
    """Tensors that autograd asked to keep, parameters excepted."""
    num_dropped: int = 0
    num_verified: int = 0
    differing: Counter[str] = field(default_factory=Counter)
    """Operators whose second run gave other bits than the first: their results are kept."""


class _Fate(Enum):
    DIFFERENT = auto()  # a second run gave other bits
    TOO_DEAR = auto()  # to keep what it is made of
    DROPPED = auto()


class Recomputation(SavedTensorStage):
    """Drops, while it is entered, what autograd saves and what is cheap to make again.

    Enter it around a forward, or a whole training step; leave it before the backward, or not. It can be entered
    again, once at a time, and remembers what it decided.

    Args:
        module: Its parameters and buffers stay alive anyway: to end a recipe on them costs nothing.
        min_bytes: Smaller tensors are kept: they are not worth the Python.
        max_depth: Operators that are run again for one tensor at most. More saves more after the forward, and needs
            more for a moment in the backward.
        dropout: ``"mask"`` keeps masks as bits; ``"replay"`` keeps the state of the generator and draws again.
        verify: ``"first-step"``: the first time a tensor is dropped at some place and in some shape, it is made again
            at once and compared to the bit; if it differs, it is kept from then on. ``"always"``: each time.
            ``"never"``.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        *,
        min_bytes: int = 1024,
        max_depth: int = 12,
        dropout: Literal["mask", "replay"] = "mask",
        verify: Literal["first-step", "always", "never"] = "first-step",
    ) -> None:
        super().__init__(module)
        self._min_bytes = min_bytes
        self._max_depth = max_depth
        self._verify = verify
        self._recorder = RecipeRecorder(dropout, weakref.WeakMethod(self._hold_inputs))
        self._costs = HoldingCosts(self._buffers, parameters_move=False)
        self._fates: dict[int, dict[Any, _Fate]] = {}  # by recipe, then by shape
        self._unseen_references = 0 if isinstance(self, _CountReferences) else _references_of_autograds_own()
        self.report = RecomputationReport()

    @override
    def begin(self, stack: ExitStack) -> TorchDispatchMode | None:
        self.report = RecomputationReport()
        parameters_move = self._module is not None and is_sharded(self._module)
        self._recorder.parameters_move = parameters_move
        self._costs = HoldingCosts(self._buffers, parameters_move=parameters_move)
        stack.callback(self._clear)
        stack.enter_context(self._recorder)
        return self._recorder

    @override
    def take(self, tensor: Tensor) -> Taken | None:
        return self.hand_on(tensor)

    def _clear(self) -> None:
        if self._recorder.clear(self.report.num_saved):  # another program: what is kept in it may pay for other things
            for place, fates in self._fates.items():
                self._fates[place] = {shape: fate for shape, fate in fates.items() if fate is not _Fate.TOO_DEAR}

    @override
    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if kind in PARAMETER_CLASSES:
            return tensor, num_writes(tensor)  # itself: FSDP refills the memory of parameters
        self.report.num_saved += 1
        if kind not in PLAIN_TYPES or not is_strided(tensor):
            return pack_in_place(tensor)
        value = self._recorder.find(tensor)
        if value is None:
            if tensor.nbytes < self._min_bytes or storage_address(tensor) in self._buffers:
                return tensor if tensor.is_leaf else alias(tensor), num_writes(tensor)
            return self._keep(self._recorder.value_of(tensor), tensor)
        if value.is_copy and value.recipe is not None:
            is_fresh = value.recipe.position == self._recorder.position
            if not is_fresh or sys.getrefcount(tensor) > self._unseen_references:
                value.recipe = None
        return self._decide(value, tensor)

    @override
    @hide_from_dynamo
    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is Kept:
            return packed.restore()
        if type(packed) is tuple or isinstance(packed, Tensor):
            return unpack(packed)
        with self._recorder.paused(), torch.no_grad(), without_autocast():
            return restore(packed) if isinstance(packed, Dropped) else packed.restore()

    def _decide(self, value: Value, tensor: Tensor) -> Any:
        kept = value.find_kept()
        if kept is not None:
            return kept
        dropped = value.find_dropped()
        recipe = value.recipe
        if dropped is None and recipe is not None and tensor.nbytes >= self._min_bytes:
            if recipe.depth == 0 and type(recipe.inputs[0]()) in PARAMETER_CLASSES:
                return alias(tensor), num_writes(tensor)  # a weight transposed: no memory of its own
            dropped = self._drop(value, tensor)
        return dropped.save() if dropped is not None else self._keep(value, tensor)

    def _keep(self, value: Value, tensor: Tensor) -> Kept:
        if value.recipe is not None:
            value.recipe.held = None
        base = base_of(tensor) if is_view(tensor) else None
        is_lasting = self._costs.is_free(value, base if base is not None else tensor)
        with self._recorder.paused(), torch.no_grad(), without_autocast(), saving(tensor):
            if isinstance(value, MaskValue) and (value.is_scaled or tensor.nbytes >= self._min_bytes):
                kept: Kept = KeptMask(tensor, self.hand_on)
            else:
                taken = self.hand_on(tensor) if not is_lasting else None
                kept = KeptElsewhere(tensor, taken) if taken is not None else Kept(alias(tensor), num_writes(tensor))
        self._recorder.watch(value, kept)
        if not is_lasting:
            self.report.kept_bytes += kept.num_bytes
        return kept

    def _drop(self, value: Value, tensor: Tensor) -> Dropped | None:
        recipe = value.recipe
        assert recipe is not None
        fates = self._fates.setdefault(recipe.identify(), {})
        shape = (tensor.shape, tensor.stride(), tensor.dtype)
        fate = fates.get(shape) or _unanimous(fates)
        if fate is not None and fate is not _Fate.DROPPED:
            return None
        found = find_sources(value, self._max_depth)
        if found is None:
            return None
        if fate is None and not self._costs.is_worth_it(found[0], tensor, recipe):
            fates[shape] = _Fate.TOO_DEAR
            return None
        sources = self._hold_all(found[0])
        if sources is None:
            return None
        if self._verify == "always" or fate is None:
            fate = fates[shape] = self._compare(value, tensor)
            if fate is not _Fate.DROPPED:
                return None
        recipe.held = None
        self._recorder.mark_used(value)
        dropped = Dropped(value, sources, found[1], tensor)
        value.dropped = weakref.ref(dropped)
        if self._costs.owns_memory(recipe):
            self.report.dropped_bytes += tensor.nbytes
            self.report.num_dropped += 1
        return dropped

    def _hold_all(self, sources: Iterable[Value]) -> list[Kept | Dropped] | None:
        """Return what keeps each source for recipes to end on; ``None`` if one is gone."""
        held: list[Kept | Dropped] = []
        for source in sources:
            holder: Kept | Dropped | None = source.find_kept()
            if holder is None:
                holder = source.find_dropped()
            if holder is None:
                if not self._costs.can_hold(source):
                    return None
                holder = self._hold(source)
            if not isinstance(holder, Dropped):
                holder.is_end = True
            held.append(holder)
        return held

    def _hold(self, source: Value) -> Kept:
        origin = source()
        assert origin is not None
        kept = self._keep(source, origin)
        if source.address in self._costs.buffers and origin.nbytes <= COPIED_BYTES:
            with self._recorder.paused(), torch.no_grad():
                kept.copy()  # a buffer may be moved between the step and its backward
        return kept

    def _hold_inputs(self, value: Value) -> list[Kept | Dropped] | None:
        """Keep what a growing operator read until its result is saved, if the result would be dropped then."""
        tensor, recipe = value(), value.recipe
        found = find_sources(value, self._max_depth)
        if found is None or tensor is None or recipe is None or tensor.nbytes < self._min_bytes:
            return None
        return self._hold_all(found[0]) if self._costs.is_worth_it(found[0], tensor, recipe) else None

    def _compare(self, value: Value, tensor: Tensor) -> _Fate:
        if self._verify == "never" or tensor.is_meta:
            return _Fate.DROPPED
        with self._recorder.paused(), torch.no_grad(), without_autocast():
            is_equal = gives_same_bits(value, tensor)
        self.report.num_verified += 1
        if is_equal:
            return _Fate.DROPPED
        assert value.recipe is not None
        self.report.differing[str(value.recipe.function)] += 1
        return _Fate.DIFFERENT


class _CountReferences(Recomputation):
    """Counts the references to what is packed, as :meth:`Recomputation._pack` sees them."""

    num_references = 0

    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        self.num_references = sys.getrefcount(tensor)
        return tensor.detach()


@cache
def _references_of_autograds_own() -> int:
    """References to a tensor that no Python code has: ``hardswish_`` saves a copy of what it will overwrite."""
    counter = _CountReferences()
    with torch.enable_grad(), counter, without_dispatch():  # once per process, seen by nobody
        nn.functional.hardswish(torch.ones(1).requires_grad_() * 1, inplace=True)
    return counter.num_references


def _unanimous(fates: dict[Any, _Fate]) -> _Fate | None:
    """Return what became of all shapes, if enough were tried: batches may have any length."""
    return next(iter(fates.values())) if len(fates) >= _MAX_SHAPES and len(set(fates.values())) == 1 else None
