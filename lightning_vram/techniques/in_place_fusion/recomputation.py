"""Drop every saved activation that is cheap to recompute; recompute it in the backward, bit-exactly.

A dispatch mode records how each result of a cheap operator is computed, in any eager model. When autograd saves a
tensor, a hook drops it if it can be recomputed from tensors that are saved anyway and that saves bytes. Autograd's
backward gets the same numbers, double backward included. Not reached: what a ``torch.autograd.Function`` holds in
attributes, what a ``torch.func`` transform saves, and compiled code: see :func:`apply_compiled_recomputation`.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_vram.core.hooks import SavedTensorStage, StoredTensor, pack_in_place, saving, unpack
from lightning_vram.core.operators import Family, family_of, in_place_form
from lightning_vram.core.patching import Swaps
from lightning_vram.core.tensors import properties
from lightning_vram.memory.storages import NO_VERSION, storage_address, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import FakeTensor, hide_from_dynamo, without_dispatch
from lightning_vram.private_names.torch import base_of, is_view, num_writes, without_autocast
from lightning_vram.techniques.in_place_fusion import recipes
from lightning_vram.techniques.in_place_fusion.recorder import COPIED_BYTES, RecipeRecorder

_MAX_STEPS = 400  # values looked at to find the ends of one recipe: long chains of views end here
_MAX_LEVELS = 100  # of recursion


def find_sources(value: recipes.Value, max_depth: int) -> tuple[list[recipes.Value], int] | None:
    """Return the ends of the recipe of ``value`` and its depth in operators; ``None`` if above ``max_depth``."""
    sources: list[recipes.Value] = []
    depth = _find(value, max_depth, sources, {}, 0)
    return (sources, depth) if depth <= max_depth else None


def _find(
    value: recipes.Value, max_depth: int, sources: list[recipes.Value], depths: dict[int, int], level: int
) -> int:
    key = id(value)
    if key in depths:
        return depths[key]
    recipe = value.recipe
    if recipe is None or (value.saved is not None and value.find_saved() is not None) or _outlived_its_base(value):
        sources.append(value)
        depth = 0
    elif value.dropped is not None and (dropped := value.dropped()) is not None:
        sources.append(value)
        depth = dropped.depth
    elif level > _MAX_LEVELS or len(depths) > _MAX_STEPS:
        depth = max_depth + 1
    else:
        found = [_find(source, max_depth, sources, depths, level + 1) for source in recipe.inputs]
        depth = max(found, default=0) + recipe.depth
    depths[key] = depth
    return depth


def _outlived_its_base(value: recipes.Value) -> bool:
    """Whether it is a view of a costly result that nobody names any more: as of ``linear`` on ``[B, T, D]``."""
    recipe = value.recipe
    if recipe is None or recipe.depth > 0 or value() is None:
        return False
    base = recipe.inputs[0]
    while base.recipe is not None and base.recipe.depth == 0 and base.find_saved() is None:
        base = base.recipe.inputs[0]
    return base.recipe is None and base() is None and base.find_saved() is None


# What follows must be called without gradients and outside of autocast.


def restore(dropped: recipes.Dropped) -> Tensor:
    """Recompute a tensor, once for all that wait. Raises ``RuntimeError`` as autograd does if it was overwritten."""
    properties.check_version(dropped.counter, dropped.version, dropped.shape)
    if dropped.num_waiting == 0:
        dropped.num_waiting = dropped.num_saved  # a retained graph asks again
    tensor = _Rebuilding(dropped.value, is_trial=False).make(dropped.value)
    dropped.num_waiting -= 1
    if dropped.num_waiting == 0:
        dropped.cache = None
    return tensor


def gives_same_bits(value: recipes.Value, tensor: Tensor) -> bool:
    """Whether ``value``, recomputed, is bitwise identical to ``tensor``, in the same strides."""
    rebuilding = _Rebuilding(value, is_trial=True)
    again = rebuilding.make(value)
    if (again.shape, again.stride(), again.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
        return False
    if isinstance(tensor, FakeTensor):
        return rebuilding.is_exact  # it has no bits
    return torch.equal(again, tensor) or bool(((again == tensor) | ((again != again) & (tensor != tensor))).all())


class _Rebuilding:
    """One walk back to the ends; what it needs more than once is recomputed once. A trial leaves no caches behind."""

    def __init__(self, value: recipes.Value, *, is_trial: bool) -> None:
        self.is_exact = True  # nothing was read that was saved with a loss
        self._is_trial = is_trial
        self._num_uses: Counter[int] = Counter()
        self._made: dict[int, Tensor] = {}
        self._count(value)
        self._is_shared = {key for key, num_uses in self._num_uses.items() if num_uses > 1}

    def make(self, value: recipes.Value) -> Tensor:
        """Return the tensor of ``value``."""
        key = id(value)
        self._num_uses[key] -= 1
        if (saved := value.find_saved()) is not None:
            self.is_exact &= saved.taken is None or saved.taken.is_exact
            return saved.read()
        dropped = value.find_dropped()
        tensor = dropped.cache if dropped is not None and dropped.cache is not None else self._made.get(key)
        if tensor is None:
            tensor = self._run(value)
            if dropped is not None and dropped.num_waiting > 0 and not self._is_trial:
                dropped.cache = tensor
        if self._num_uses[key] > 0:
            self._made[key] = tensor
        else:
            self._made.pop(key, None)
        return tensor

    def _count(self, value: recipes.Value) -> None:
        self._num_uses[id(value)] += 1
        if self._num_uses[id(value)] > 1 or value.recipe is None or value.find_saved() is not None:
            return
        dropped = value.find_dropped()
        if dropped is None or dropped.cache is None:
            for source in value.recipe.inputs:
                self._count(source)

    def _run(self, value: recipes.Value) -> Tensor:
        recipe = value.recipe
        assert recipe is not None, "a recipe ended on a value that was not saved"
        function = in_place_form(recipe.function) if self._is_made_for(recipe) else None
        args = [self._fill(arg) for arg in recipe.args]
        # An activation runs in the memory of its input.
        result = function(*args, **(recipe.kwargs or {})) if function is not None else recipe.run(args)
        if isinstance(result, Tensor):
            return result
        for reference in recipe.siblings or ():
            sibling = reference()
            dropped = sibling.find_dropped() if sibling is not None and sibling is not value else None
            if sibling is not None and dropped is not None and dropped.num_waiting > 0 and not self._is_trial:
                dropped.cache = result[sibling.index]
        return result[value.index]  # type: ignore[no-any-return]

    def _fill(self, arg: Any) -> Any:
        if isinstance(arg, recipes.Value):
            return self.make(arg)
        return [self._fill(item) for item in arg] if type(arg) is list else arg

    def _is_made_for(self, recipe: recipes.Recipe) -> bool:
        """Whether the first input is recomputed for this recipe alone."""
        source = recipe.args[0] if recipe.args else None
        if not isinstance(source, recipes.Value) or source.recipe is None or source.recipe.depth == 0:
            return False
        if source.recipe.strides is not None or recipe.strides is not None:
            return False
        return id(source) not in self._is_shared and source.find_dropped() is None and source.find_saved() is None


_MAX_SHAPES = 16  # compared bitwise for one recipe, before all others are trusted


@dataclass
class RecomputationReport:
    """What one run saved for its backward."""

    dropped_bytes: int = 0  # saved by baseline autograd, recomputed here; each tensor counts once
    kept_bytes: int = 0  # saved, ends of recipes included; without parameters and buffers
    num_saved: int = 0  # tensors that autograd asked to save, without parameters
    num_dropped: int = 0
    num_verified: int = 0
    differing: Counter[str] = field(default_factory=Counter)  # operators whose recomputation is not exact


class _Fate(Enum):
    DIFFERENT = auto()  # recomputation is not exact
    TOO_DEAR = auto()  # saving its sources costs more
    DROPPED = auto()


class Recomputation(SavedTensorStage):
    """Drops, while it is entered, saved tensors that are cheap to recompute.

    Enter it around a forward, or a whole training step; leave it before the backward, or not. It can be entered again,
    once at a time, and remembers what it decided.

    Args:
        module: Its parameters and buffers stay alive anyway: ending a recipe on them is free.
        min_bytes: Smaller tensors are saved: they are not worth the Python.
        max_depth: Most operators to recompute for one tensor. More saves more after the forward, but needs more memory
            for a moment in the backward.
        dropout: ``"mask"`` saves masks as bits; ``"replay"`` saves the state of the generator and draws again.
        verify: ``"first-step"``: the first tensor dropped at some place and in some shape is recomputed at once and
            compared bitwise; if it differs, it is saved from then on. ``"always"``: each time.
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
        self._fates: dict[int, dict[Any, _Fate]] = {}  # by recipe, then by shape
        self._unseen_references = _references_of_autograds_own()
        self.report = RecomputationReport()

    @override
    def begin(self, stack: ExitStack) -> OperatorSubscriber | None:
        self.report = RecomputationReport()
        self._recorder.parameters_move = self._module is not None and properties.is_sharded(self._module)
        stack.callback(self._clear)
        stack.enter_context(self._recorder)
        return self._recorder

    @override
    def take(self, tensor: Tensor) -> StoredTensor | None:
        return self.hand_on(tensor)

    def _clear(self) -> None:
        if self._recorder.clear(self.report.num_saved):  # another program: what is saved in it may pay for other things
            for place, fates in self._fates.items():
                self._fates[place] = {shape: fate for shape, fate in fates.items() if fate is not _Fate.TOO_DEAR}

    @override
    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        kind = type(tensor)
        if kind in properties.PARAMETER_CLASSES:
            return tensor, num_writes(tensor)  # itself: FSDP refills the memory of parameters
        self.report.num_saved += 1
        if kind not in properties.PLAIN_TYPES or not properties.is_strided(tensor):
            return pack_in_place(tensor)
        value = self._recorder.find(tensor)
        if value is None:
            if tensor.nbytes < self._min_bytes or storage_address(tensor) in self._buffers:
                return tensor if tensor.is_leaf else properties.alias(tensor), num_writes(tensor)
            return self._keep(self._recorder.value_of(tensor), tensor)
        if value.is_copy and value.recipe is not None:
            is_fresh = value.recipe.position == self._recorder.position
            if not is_fresh or sys.getrefcount(tensor) > self._unseen_references:
                value.recipe = None
        return self._decide(value, tensor)

    @override
    @hide_from_dynamo
    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is recipes.Saved and packed.taken is None:
            return packed.restore()
        if type(packed) is tuple or isinstance(packed, Tensor):
            return unpack(packed)
        with self._recorder.paused(), torch.no_grad(), without_autocast():
            return restore(packed) if isinstance(packed, recipes.Dropped) else packed.restore()

    def _decide(self, value: recipes.Value, tensor: Tensor) -> Any:
        if (saved := value.find_saved()) is not None:
            return saved
        dropped, recipe = value.find_dropped(), value.recipe
        if dropped is None and recipe is not None and tensor.nbytes >= self._min_bytes:
            if recipe.depth == 0 and type(recipe.inputs[0]()) in properties.PARAMETER_CLASSES:
                return properties.alias(tensor), num_writes(tensor)  # a weight transposed: no memory of its own
            dropped = self._drop(value, tensor)
        if dropped is None:
            return self._keep(value, tensor)
        dropped.num_saved += 1
        dropped.num_waiting += 1
        return dropped

    def _keep(self, value: recipes.Value, tensor: Tensor) -> recipes.Saved:
        if value.recipe is not None:
            value.recipe.held = None
        base = base_of(tensor) if is_view(tensor) else None
        is_lasting = self._is_free(value, base if base is not None else tensor)
        with self._recorder.paused(), torch.no_grad(), without_autocast(), saving(tensor):
            if isinstance(value, recipes.MaskValue) and (value.is_scaled or tensor.nbytes >= self._min_bytes):
                taken: StoredTensor | None = recipes.MaskBits(tensor, self.hand_on)
            else:
                taken = self.hand_on(tensor) if not is_lasting else None
            saved = recipes.Saved(tensor, taken)
        self._recorder.watch(value, saved)
        if not is_lasting:
            self.report.kept_bytes += saved.num_bytes
        return saved

    def _drop(self, value: recipes.Value, tensor: Tensor) -> recipes.Dropped | None:
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
        dropped = recipes.Dropped(
            value, sources, found[1], properties.version_counter(tensor), num_writes(tensor), tensor.shape
        )
        value.dropped = weakref.ref(dropped)
        if self._owns_memory(recipe):
            self.report.dropped_bytes += tensor.nbytes
            self.report.num_dropped += 1
        return dropped

    def _is_free(self, value: recipes.Value, tensor: Tensor) -> bool:
        """Whether the memory of ``value`` stays anyway, ``tensor`` being its tensor or what that is a view of."""
        return type(tensor) in properties.PARAMETER_CLASSES or value.address in self._buffers

    def _can_hold(self, source: recipes.Value, origin: Tensor) -> bool:
        """Whether a recipe can end here, on what is not saved or dropped: it is still there as it was."""
        is_lasting = not (self._recorder.parameters_move and type(origin) in properties.PARAMETER_CLASSES)
        return is_lasting and properties.is_strided(origin) and NO_VERSION != source.version == version_of(origin)

    def _is_worth_it(self, sources: Iterable[recipes.Value], tensor: Tensor, recipe: recipes.Recipe) -> bool:
        """Whether what would be saved for these sources alone is less than ``tensor``."""
        cost = 0
        for source in sources:
            if source.find_saved() is not None or source.find_dropped() is not None:
                continue
            origin = source()
            if origin is None or not self._can_hold(source, origin):
                return False
            if not self._is_free(source, origin):
                cost += origin.numel() // 8 if source.is_mask else origin.nbytes
        if cost == tensor.nbytes > 0:  # inputs of ``cat`` and of views are often saved later anyway
            return recipe.function is torch.ops.aten.cat.default or family_of(recipe.function) is Family.VIEW
        return cost < tensor.nbytes or cost == 0

    def _owns_memory(self, recipe: recipes.Recipe) -> bool:
        """Whether a result is more than a view of what is saved anyway or counts as dropped already."""
        if recipe.depth > 0:
            return True
        base = recipe.inputs[0]
        while base.recipe is not None and base.recipe.depth == 0:
            base = base.recipe.inputs[0]
        origin = base()
        is_free = origin is not None and self._is_free(base, origin)
        return not is_free and base.find_saved() is None and base.find_dropped() is None

    def _hold_all(self, sources: Iterable[recipes.Value]) -> list[recipes.Saved | recipes.Dropped] | None:
        """Return what keeps each source for recipes to end on; ``None`` if one is gone."""
        held: list[recipes.Saved | recipes.Dropped] = []
        for source in sources:
            holder: recipes.Saved | recipes.Dropped | None = source.find_saved() or source.find_dropped()
            if holder is None:
                origin = source()
                if origin is None or not self._can_hold(source, origin):
                    return None
                holder = self._keep(source, origin)
                if source.address in self._buffers and origin.nbytes <= COPIED_BYTES:
                    with self._recorder.paused(), torch.no_grad():
                        holder.copy()  # a buffer may be moved between the step and its backward
            if not isinstance(holder, recipes.Dropped):
                holder.is_end = True
            held.append(holder)
        return held

    def _hold_inputs(self, value: recipes.Value) -> list[recipes.Saved | recipes.Dropped] | None:
        """Keep what a growing operator read until its result is saved, if the result would be dropped then."""
        tensor, recipe = value(), value.recipe
        found = find_sources(value, self._max_depth)
        if found is None or tensor is None or recipe is None or tensor.nbytes < self._min_bytes:
            return None
        return self._hold_all(found[0]) if self._is_worth_it(found[0], tensor, recipe) else None

    def _compare(self, value: recipes.Value, tensor: Tensor) -> _Fate:
        if self._verify == "never" or tensor.is_meta:
            return _Fate.DROPPED
        with self._recorder.paused(), torch.no_grad(), without_autocast():
            is_equal = gives_same_bits(value, tensor)
        self.report.num_verified += 1
        if is_equal:
            return _Fate.DROPPED
        assert value.recipe is not None
        self.report.differing[value.recipe.function.__name__] += 1
        return _Fate.DIFFERENT


@cache
def _references_of_autograds_own() -> int:
    """References to a tensor that no Python code has: ``hardswish_`` saves a copy of what it will overwrite."""
    counts: list[int] = []

    @hide_from_dynamo  # as Recomputation._pack
    def pack(tensor: Tensor) -> Tensor:
        counts.append(sys.getrefcount(tensor))
        return tensor.detach()

    with torch.enable_grad(), saved_tensors_hooks(pack, Tensor.detach), without_dispatch():  # once, seen by nobody
        nn.functional.hardswish(torch.ones(1).requires_grad_() * 1, inplace=True)
    return counts[-1]


def _unanimous(fates: dict[Any, _Fate]) -> _Fate | None:
    """Return what became of all shapes, if enough were tried: batches may have any length."""
    return next(iter(fates.values())) if len(fates) >= _MAX_SHAPES and len(set(fates.values())) == 1 else None


# In compiled code no dispatch mode sees norms and activations: ``torch.utils.checkpoint`` marks operators there to be
# recomputed, fused into the kernels that read them; the graph stays whole and the results bit-exact. Batch norms are
# left to the partitioner: marked, they cost memory (10.0 against 6.0 maps on four convolution blocks); it recomputes
# them itself once the activation behind them is marked.

_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    *(nn.CELU, nn.ELU, nn.GELU, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh),
    *(nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
)
_FORWARDS = frozenset(vars(kind)["forward"] for kind in _MODULES)


def apply_compiled_recomputation(model: nn.Module) -> Swaps:
    """Let the norms and activations of ``model`` be recomputed in backward where they run compiled; return the undo.

    Eager code runs unchanged. Parts of ``model`` may be compiled before or after. Inside a checkpointed layer all is
    marked already.
    """
    handle = Swaps("_compiled_recomputation")
    for module in model.modules():
        is_stock = getattr(type(module), "forward", None) in _FORWARDS and "forward" not in vars(module)
        if is_stock and not getattr(module, "inplace", False):
            with suppress(ValueError):  # scripted, or taken by another technique
                handle.add(module, None, _run)
    return handle


def _run(module: nn.Module, state: None, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return original(*args, **kwargs)
    return checkpoint(original, *args, use_reentrant=False, **kwargs)
