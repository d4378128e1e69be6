"""What it costs to keep what a dropped tensor is made of, and whether dropping it is worth that."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.operators.families import Family, family_of
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES
from lightning_vram.core.tensors.versions import NO_VERSION, is_strided, version_of
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import Recipe, Value


class HoldingCosts:
    """The costs in one run, given the storages of buffers, and whether parameters are freed between the forwards."""

    def __init__(self, buffers: set[int], *, parameters_move: bool) -> None:
        self.buffers = buffers
        self._parameters_move = parameters_move

    def is_free(self, value: Value, tensor: Tensor) -> bool:
        """Whether the memory of ``value`` stays anyway, ``tensor`` being its tensor or what that is a view of."""
        return type(tensor) in PARAMETER_CLASSES or value.address in self.buffers

    def can_hold(self, source: Value) -> bool:
        """Whether a recipe can end here: it is kept or dropped already, or still there as it was."""
        if source.find_kept() is not None or source.find_dropped() is not None:
            return True
        origin = source()
        if origin is None or source.version == NO_VERSION or source.version != version_of(origin):
            return False
        return is_strided(origin) and not (self._parameters_move and type(origin) in PARAMETER_CLASSES)

    def is_worth_it(self, sources: Iterable[Value], tensor: Tensor, recipe: Recipe) -> bool:
        """Whether what would be kept for these sources alone is less than ``tensor``."""
        cost = 0
        for source in sources:
            origin = source()
            if source.find_kept() is not None or source.find_dropped() is not None:
                continue
            if origin is None or not self.can_hold(source):
                return False
            if not self.is_free(source, origin):
                cost += origin.numel() // 8 if source.is_mask else origin.nbytes
        return cost < tensor.nbytes or cost == 0 or (cost == tensor.nbytes and _drops_on_tie(recipe.function))

    def owns_memory(self, recipe: Recipe) -> bool:
        """Whether a result is more than a view of what is kept anyway or counts as dropped already."""
        if recipe.depth > 0:
            return True
        base = recipe.inputs[0]
        while base.recipe is not None and base.recipe.depth == 0:
            base = base.recipe.inputs[0]
        origin = base()
        is_free = origin is not None and self.is_free(base, origin)
        return not is_free and base.find_kept() is None and base.find_dropped() is None


def _drops_on_tie(function: Any) -> bool:
    """Whether a result is dropped if its inputs are as large: those of ``cat`` and of views are often kept later."""
    return family_of(function) is Family.VIEW or function is torch.ops.aten.cat.default
