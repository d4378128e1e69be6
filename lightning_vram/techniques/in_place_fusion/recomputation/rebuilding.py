"""Make a dropped tensor again: find what it can be made from when it is dropped, and make it when it is asked for."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.operators.families import in_place_form
from lightning_vram.core.tensors.versions import check_version
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import Dropped, Recipe, Value, WriteRecipe

_MAX_STEPS = 400  # values looked at to find the ends of one recipe: long chains of views end here
_MAX_LEVELS = 100  # of recursion


def find_sources(value: Value, max_depth: int) -> tuple[list[Value], int] | None:
    """Find what ``value`` can be made again from: values that are kept or dropped, or that nobody made cheaply.

    Returns:
        The sources, and how many operators run one after the other; ``None`` if those are more than ``max_depth``.
    """
    sources: list[Value] = []
    depth = _find(value, max_depth, sources, {}, 0)
    return (sources, depth) if depth <= max_depth else None


def _find(value: Value, max_depth: int, sources: list[Value], depths: dict[int, int], level: int) -> int:
    key = id(value)
    depth = depths.get(key)
    if depth is not None:
        return depth
    recipe = value.recipe
    if recipe is None or (value.kept is not None and value.find_kept() is not None) or _outlived_its_base(value):
        sources.append(value)
        depth = 0
    elif value.dropped is not None and (dropped := value.dropped()) is not None:
        sources.append(value)
        depth = dropped.depth
    elif level > _MAX_LEVELS or len(depths) > _MAX_STEPS:
        depth = max_depth + 1
    else:
        depth = 0
        for source in recipe.inputs:
            depth = max(depth, _find(source, max_depth, sources, depths, level + 1))
        depth += recipe.depth
    depths[key] = depth
    return depth


def _outlived_its_base(value: Value) -> bool:
    """Whether it is a view of a costly result that nobody names any more: as of ``linear`` on ``[B, T, D]``."""
    recipe = value.recipe
    if recipe is None or recipe.depth > 0 or value() is None:
        return False
    base = recipe.inputs[0]
    while base.recipe is not None and base.recipe.depth == 0 and base.find_kept() is None:
        base = base.recipe.inputs[0]
    return base.recipe is None and base() is None and base.find_kept() is None


# What follows is to be called without gradients and outside of autocast.


def restore(dropped: Dropped) -> Tensor:
    """Make a tensor again, once for all that wait. Raises ``RuntimeError`` as autograd does if it was overwritten."""
    check_version(dropped.counter, dropped.version, dropped.shape)
    if dropped.num_waiting == 0:
        dropped.num_waiting = dropped.num_saved  # a retained graph asks again
    tensor = _Rebuilding(dropped.value, is_trial=False).make(dropped.value)
    dropped.num_waiting -= 1
    if dropped.num_waiting == 0:
        dropped.cache = None
    return tensor


def gives_same_bits(value: Value, tensor: Tensor) -> bool:
    """Whether ``value``, made again, is ``tensor`` to the bit, in the same strides."""
    rebuilding = _Rebuilding(value, is_trial=True)
    again = rebuilding.make(value)
    if (again.shape, again.stride(), again.dtype) != (tensor.shape, tensor.stride(), tensor.dtype):
        return False
    if isinstance(tensor, FakeTensor):
        return rebuilding.is_exact  # it has no bits
    return torch.equal(again, tensor) or bool(((again == tensor) | ((again != again) & (tensor != tensor))).all())


class _Rebuilding:
    """One walk back to the ends; what it needs more than once it makes once and holds no longer than needed.

    A trial leaves nothing behind for those that wait for the values on the way.
    """

    def __init__(self, value: Value, *, is_trial: bool) -> None:
        self.is_exact = True
        """Whether nothing was read that lost something where it was kept."""
        self._is_trial = is_trial
        self._num_uses: Counter[int] = Counter()
        self._made: dict[int, Tensor] = {}
        self._count(value)
        self._is_shared = {key for key, num_uses in self._num_uses.items() if num_uses > 1}

    def make(self, value: Value) -> Tensor:
        """Return the tensor of ``value``."""
        key = id(value)
        self._num_uses[key] -= 1
        kept = value.find_kept()
        if kept is not None:
            self.is_exact &= kept.is_exact
            return kept.read()
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

    def _count(self, value: Value) -> None:
        self._num_uses[id(value)] += 1
        if self._num_uses[id(value)] > 1 or value.recipe is None or value.find_kept() is not None:
            return
        dropped = value.find_dropped()
        if dropped is None or dropped.cache is None:
            for source in value.recipe.inputs:
                self._count(source)

    def _run(self, value: Value) -> Tensor:
        recipe = value.recipe
        assert recipe is not None, "a recipe ended on a value that was not saved"
        function = in_place_form(recipe.function) if self._is_made_for(recipe) else None
        args = [self._fill(arg) for arg in recipe.args]
        if function is not None:  # an activation, in the memory of its input
            result = function(*args, **recipe.kwargs) if recipe.kwargs else function(*args)
        else:
            result = recipe.run(args)
        if isinstance(result, Tensor):
            return result
        for reference in recipe.siblings or ():
            sibling = reference()
            dropped = sibling.find_dropped() if sibling is not None and sibling is not value else None
            if sibling is not None and dropped is not None and dropped.num_waiting > 0 and not self._is_trial:
                dropped.cache = result[sibling.index]
        return result[value.index]  # type: ignore[no-any-return]

    def _fill(self, arg: Any) -> Any:
        if isinstance(arg, Value):
            return self.make(arg)
        return [self._fill(item) for item in arg] if type(arg) is list else arg

    def _is_made_for(self, recipe: Recipe) -> bool:
        """Whether the first input is made again for this recipe alone."""
        source = recipe.args[0] if recipe.args else None
        if not isinstance(source, Value) or source.recipe is None or source.recipe.depth == 0:
            return False
        if isinstance(source.recipe, WriteRecipe) or isinstance(recipe, WriteRecipe):
            return False  # strides of their own
        is_shared = id(source) in self._is_shared or source.find_dropped() is not None
        return not is_shared and source.find_kept() is None
