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
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.stage import Stage, Taken, in_chain, innermost_stage
from lightning_vram.core.hooks.stepping_aside import stepping_aside
from lightning_vram.core.hooks.unfinished_saves import saving
from lightning_vram.core.operators.families import Family, family_of
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES, PLAIN_TYPES
from lightning_vram.core.tensors.versions import NO_VERSION, alias, check_version, is_strided, version_of
from lightning_vram.private_names.torch.autocast import without_autocast
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.tensors import base_of, is_view, num_writes
from lightning_vram.techniques.in_place_fusion.recomputation.kept import Kept, KeptElsewhere, KeptMask
from lightning_vram.techniques.in_place_fusion.recomputation.rebuilding import Dropped, find_sources, rebuild
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import MaskValue, Recipe, Value
from lightning_vram.techniques.in_place_fusion.recomputation.recorder import COPIED_BYTES, RecipeRecorder

aten = torch.ops.aten


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


class Recomputation:
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
        self._module = module
        self._min_bytes = min_bytes
        self._max_depth = max_depth
        self._verify = verify
        self._recorder = RecipeRecorder(dropout, weakref.WeakMethod(self._hold_inputs))
        self._values = self._recorder.values
        self._exit: ExitStack | None = None
        self._next: Stage | None = None
        self._fates: dict[int, dict[Any, _Fate]] = {}  # by recipe, then by shape
        self._lasting: set[int] = set()
        self._unseen_references = 0 if isinstance(self, _CountReferences) else _references_of_autograds_own()
        self.report = RecomputationReport()

    def __enter__(self) -> Self:
        if self._exit is not None:
            raise RuntimeError("this Recomputation is entered already: it does not nest.")
        self.report = RecomputationReport()
        self._next = innermost_stage()
        if self._module is not None:
            self._lasting = {id(buffer) for buffer in self._module.buffers()}
            self._recorder.parameters_move = is_sharded(self._module)
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        with ExitStack() as stack:
            stack.callback(self._clear)
            stack.enter_context(hooks)
            stack.enter_context(in_chain(self))
            stack.enter_context(stepping_aside(hooks, self._recorder))
            stack.enter_context(self._recorder)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._exit = self._exit, None
        if stack is not None:
            stack.close()

    def _clear(self) -> None:
        if self._recorder.clear(self.report.num_saved):  # another program: what is kept in it may pay for other things
            for place, fates in self._fates.items():
                self._fates[place] = {shape: fate for shape, fate in fates.items() if fate is not _Fate.TOO_DEAR}

    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        """Decide what becomes of a tensor that autograd saves; return what stands for it."""
        kind = type(tensor)
        if kind in PARAMETER_CLASSES:
            return tensor, num_writes(tensor)  # itself: FSDP refills the memory of parameters
        self.report.num_saved += 1
        if kind not in PLAIN_TYPES or not is_strided(tensor):
            return tensor.detach() if tensor.grad_fn is not None else tensor
        value = self._values.find(tensor)
        if value is None:
            if tensor.nbytes < self._min_bytes or id(tensor) in self._lasting:
                return tensor if tensor.is_leaf else alias(tensor), num_writes(tensor)
            return self._keep(self._values.value_of(tensor), tensor)
        if value.is_copy and value.recipe is not None:
            is_fresh = value.recipe.position == self._recorder.position
            if not is_fresh or sys.getrefcount(tensor) > self._unseen_references:
                value.recipe = None
        return self._decide(value, tensor)

    @hide_from_dynamo
    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if type(packed) is tuple:
            saved: Tensor = packed[0]
            check_version(saved, packed[1], saved.shape)
            return saved
        if type(packed) is Kept:
            return packed.restore()
        dropped: Dropped | KeptElsewhere | KeptMask = packed
        with self._recorder.paused(), torch.no_grad(), without_autocast():
            return dropped.restore()

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
        is_lasting = self._is_lasting(tensor if base is None else base)
        with self._recorder.paused(), torch.no_grad(), without_autocast(), saving(tensor):
            if isinstance(value, MaskValue) and (value.is_scaled or tensor.nbytes >= self._min_bytes):
                kept: Kept = KeptMask(tensor, self._hand_on)
            else:
                taken = self._hand_on(tensor) if not is_lasting else None
                kept = KeptElsewhere(tensor, taken) if taken is not None else Kept(alias(tensor), num_writes(tensor))
        self._values.watch(value, kept)
        if not is_lasting:
            self.report.kept_bytes += kept.num_bytes
        return kept

    def take(self, tensor: Tensor) -> Taken | None:
        """Hand on what a stage inside of this one offers."""
        return self._hand_on(tensor)

    def _hand_on(self, tensor: Tensor) -> Taken | None:
        """Offer what is to be kept to the stage outside, if there is one."""
        return self._next.take(tensor) if self._next is not None else None

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
        if fate is None and not self._is_worth_it(found[0], tensor, recipe):
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
        if self._owns_memory(recipe):
            self.report.dropped_bytes += tensor.nbytes
            self.report.num_dropped += 1
        return dropped

    def _can_be_held(self, source: Value) -> bool:
        """Whether a recipe can end here: it is kept or dropped already, or still there as it was."""
        if source.find_kept() is not None or source.find_dropped() is not None:
            return True
        origin = source()
        if origin is None or source.version == NO_VERSION or source.version != version_of(origin):
            return False
        is_moving = self._recorder.parameters_move and type(origin) in PARAMETER_CLASSES
        return is_strided(origin) and not is_moving

    def _is_worth_it(self, sources: Iterable[Value], tensor: Tensor, recipe: Recipe) -> bool:
        """Whether what would be kept for these sources alone is less than ``tensor``."""
        cost = 0
        for source in sources:
            origin = source()
            if source.find_kept() is not None or source.find_dropped() is not None:
                continue
            if origin is None or not self._can_be_held(source):
                return False
            if not self._is_lasting(origin):
                cost += origin.numel() // 8 if source.is_mask else origin.nbytes
        return cost < tensor.nbytes or cost == 0 or (cost == tensor.nbytes and _drops_on_tie(recipe.function))

    def _hold_all(self, sources: Iterable[Value]) -> list[Kept | Dropped] | None:
        """Return what keeps each source for recipes to end on; ``None`` if one is gone."""
        held: list[Kept | Dropped] = []
        for source in sources:
            holder: Kept | Dropped | None = source.find_kept()
            if holder is None:
                holder = source.find_dropped()
            if holder is None:
                if not self._can_be_held(source):
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
        if id(origin) in self._lasting and origin.nbytes <= COPIED_BYTES:
            with self._recorder.paused(), torch.no_grad():
                kept.copy()  # a buffer may be moved between the step and its backward
        return kept

    def _hold_inputs(self, value: Value) -> list[Kept | Dropped] | None:
        """Keep what a growing operator read until its result is saved, if the result would be dropped then."""
        tensor, recipe = value(), value.recipe
        found = find_sources(value, self._max_depth)
        if found is None or tensor is None or recipe is None or tensor.nbytes < self._min_bytes:
            return None
        return self._hold_all(found[0]) if self._is_worth_it(found[0], tensor, recipe) else None

    def _is_lasting(self, tensor: Tensor) -> bool:
        return type(tensor) in PARAMETER_CLASSES or id(tensor) in self._lasting

    def _owns_memory(self, recipe: Recipe) -> bool:
        """Whether a result is more than a view of what is kept anyway or counts as dropped already."""
        if recipe.depth > 0:
            return True
        base = recipe.inputs[0]
        while base.recipe is not None and base.recipe.depth == 0:
            base = base.recipe.inputs[0]
        origin = base()
        is_lasting = origin is not None and self._is_lasting(origin)
        return not is_lasting and base.find_kept() is None and base.find_dropped() is None

    def _compare(self, value: Value, tensor: Tensor) -> _Fate:
        if self._verify == "never" or type(tensor) is FakeTensor or tensor.is_meta:
            return _Fate.DROPPED
        with self._recorder.paused(), torch.no_grad(), without_autocast():
            again = rebuild(value, is_trial=True)
            is_equal = again.stride() == tensor.stride() and _same_bits(again, tensor)
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
    with torch.enable_grad(), counter:
        nn.functional.hardswish(torch.ones(1).requires_grad_() * 1, inplace=True)
    return counter.num_references


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 shards ``module`` or a part of it, so that parameters come and go with the layers."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule  # absent from builds without torch.distributed

    return any(isinstance(part, FSDPModule) for part in module.modules())


def _unanimous(fates: dict[Any, _Fate]) -> _Fate | None:
    """Return what became of all shapes, if enough were tried: batches may have any length."""
    return next(iter(fates.values())) if len(fates) >= _MAX_SHAPES and len(set(fates.values())) == 1 else None


def _drops_on_tie(function: Any) -> bool:
    """Whether a result is dropped if its inputs are as large: those of ``cat`` and of views are often kept later."""
    return family_of(function) is Family.VIEW or function is aten.cat.default


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    return torch.equal(tensor, other) or bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())
