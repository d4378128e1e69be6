"""What is noted of one run: the values of tensors, the recipes they came by, and which of these were of use."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_vram.core.hooks.mode import QuietMode
from lightning_vram.core.operators.families import iterate_written
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES, PLAIN_TYPES
from lightning_vram.core.tensors.versions import version_of
from lightning_vram.private_names.torch.tensors import num_writes
from lightning_vram.techniques.in_place_fusion.recomputation.kept import Kept
from lightning_vram.techniques.in_place_fusion.recomputation.noted_values import NotedValues
from lightning_vram.techniques.in_place_fusion.recomputation.recipes import Dropped, Recipe, Value

COPIED_BYTES = 64 * 1024  # weights of norms and small buffers; what is larger is not copied to rebuild from it
MAX_HELD = 4  # recipes whose inputs are held at a time
HoldInputs = Callable[[Value], list[Kept | Dropped] | None]


class RecipeNotes(QuietMode):
    """What ``handlers.py`` writes down for each operator.

    Args:
        dropout: How masks can be had again.
        hold_inputs: Decides whether what a growing operator read has to outlive the caller's references to it.
    """

    def __init__(self, dropout: Literal["mask", "replay"], hold_inputs: "weakref.WeakMethod[HoldInputs]") -> None:
        super().__init__()
        self.dropout = dropout
        self.hold_inputs = hold_inputs
        self.values = NotedValues()
        self.parameters_move = False
        """Whether parameters are freed between the layers' forwards: recipes then end on copies of the small ones."""
        self.position = 0
        """Number of the cheap or writing operator that ran last."""
        self.held: deque[Recipe] = deque()  # what they read, until the result is saved
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._program = 0, 0
        self._learned: list[Recipe] | None = []  # all recipes of this run
        self._useless: dict[int, Any] = {}  # position -> operator

    def clear(self, num_saved: int) -> bool:
        """Forget this run, in which autograd saved ``num_saved`` tensors, but for what was learned from it.

        What was of no use is not noted from the next run on.

        Returns:
            Whether it was another program than the one before.
        """
        self.values.clear()
        self.held.clear()
        self._copies.clear()
        is_another = (self.position, num_saved) != self._program
        if self._learned is not None:
            self._useless = {recipe.position: recipe.function for recipe in self._learned if not recipe.is_used}
            self._learned = None
        elif is_another:
            self._useless = {}
            self._learned = []
        self._program = self.position, num_saved
        self.position = 0
        return is_another

    def mark_used(self, value: Value) -> None:
        """Note that ``value`` will be made again, so that its recipe is noted in later runs too."""
        if self._learned is None:
            return
        waiting = [value]
        while waiting:
            recipe = waiting.pop().recipe
            if recipe is not None and not recipe.is_used:
                recipe.is_used = True
                waiting.extend(recipe.inputs)

    def recipe(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, depth: int = 1) -> Recipe:
        """Make the recipe of a call."""
        inputs: list[Value] = []
        recipe = Recipe(function, self.with_values(args, inputs), kwargs, inputs, depth)
        recipe.position = self.position
        if self._learned is not None:
            self._learned.append(recipe)
        return recipe

    def with_values(self, args: Iterable[Any], inputs: list[Value]) -> tuple[Any, ...]:
        """Return ``args`` with values in the place of tensors, which are added to ``inputs``."""
        filled: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                if self.parameters_move and _is_small_weight(arg, args):
                    arg = self._copy_parameter(arg)
                else:
                    arg = self.values.value_of(arg)
                    inputs.append(arg)
            elif type(arg) is list:
                arg = list(self.with_values(arg, inputs))
            filled.append(arg)
        return tuple(filled)

    def note(self, tensor: Tensor, recipe: Recipe, index: int = 0) -> Value:
        """Note that ``tensor`` is result number ``index`` of ``recipe``."""
        return self.values.note(tensor, recipe, version_of(tensor), index)

    def before_write(self, target: Tensor, *, is_told: bool = True) -> None:
        """Save what recipes end on, and forget what is not told by a version."""
        with self.paused():
            self.values.before_write(target)
        if not is_told:
            self.values.forget(target)

    def before_unseen_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        """Protect what is kept from writes in inference mode and by wrappers of tensors, of which nothing is noted."""
        for target in iterate_written(func, args, kwargs):
            if type(target) in PLAIN_TYPES:
                self.before_write(target, is_told=False)

    def _copy_parameter(self, parameter: Tensor) -> Tensor:
        """Copy a parameter that will not be there when a second run asks: FSDP frees it after its layer's forward."""
        known = self._copies.get(id(parameter))
        if known is None or known[0] is not parameter or known[1] != num_writes(parameter):
            with self.paused(), torch.no_grad():
                known = self._copies[id(parameter)] = (parameter, num_writes(parameter), parameter.detach().clone())
        return known[2]


def _is_small_weight(arg: Tensor, args: Iterable[Any]) -> bool:
    """Whether it is a parameter beside others, such as the weight of a norm, and not what a view is made of."""
    return type(arg) in PARAMETER_CLASSES and arg.nbytes <= COPIED_BYTES and next(iter(args)) is not arg
