"""What is noted of one run: the values of tensors, the recipes they came by, and which of these were of use.

No value is taken for what it was before a write: writes pass here.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_vram.core.hooks.mode import QuietMode
from lightning_vram.core.operators.families import iterate_written
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES, PLAIN_TYPES
from lightning_vram.core.tensors.versions import NO_VERSION, storage_address, version_of
from lightning_vram.private_names.torch.tensors import count_storage_users, num_writes, storage_identity
from lightning_vram.techniques.in_place_fusion.recomputation.kept import Kept
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
        self.parameters_move = False
        """Whether parameters are freed between the layers' forwards: recipes then end on copies of the small ones."""
        self.position = 0
        """Number of the cheap or writing operator that ran last."""
        self.held: deque[Recipe] = deque()  # what they read, until the result is saved
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        self._values: dict[int, Value] = {}  # by id of the tensor, which may be gone and its id be another's
        self._new: list[Value] = []  # not yet in the next
        self._by_address: dict[int, list[Value]] = {}
        self._kept: dict[int, list[weakref.ref[Kept]]] = {}  # by address of the storage; outlive the run
        self._program = 0, 0
        self._learned: list[Recipe] | None = []  # all recipes of this run
        self._useless: dict[int, Any] = {}  # position -> operator

    def clear(self, num_saved: int) -> bool:
        """Forget this run, in which autograd saved ``num_saved`` tensors.

        What is still kept for a backward stays watched; what was of no use is not noted from the next run on.

        Returns:
            Whether it was another program than the one before.
        """
        for records in (self.held, self._copies, self._values, self._new, self._by_address):
            records.clear()
        alive = {address: [ref for ref in refs if ref() is not None] for address, refs in self._kept.items()}
        self._kept = {address: refs for address, refs in alive.items() if refs}
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
                    arg = self.value_of(arg)
                    inputs.append(arg)
            elif type(arg) is list:
                arg = list(self.with_values(arg, inputs))
            filled.append(arg)
        return tuple(filled)

    def find(self, tensor: Tensor) -> Value | None:
        """Return the value of ``tensor`` as it is now, if it is known."""
        value = self._values.get(id(tensor))
        if value is None or value() is not tensor or value.version == NO_VERSION:
            return None
        # Not by way of version_of() and storage_address(): this runs for every argument of every cheap operator.
        if value.version != num_writes(tensor) or (value.address and value.address != storage_identity(tensor)):
            return None  # written to, or its ``.data`` set
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value of ``tensor`` as it is now."""
        value = self.find(tensor)
        if value is None:
            return self.note(tensor, None)
        if value.is_copy:
            value.recipe = None
        return value

    def note(
        self,
        tensor: Tensor,
        recipe: Recipe | None,
        version: int | None = None,
        index: int = 0,
        on_death: Callable[[Any], None] | None = None,
        kind: type[Value] = Value,
    ) -> Value:
        """Make the value of ``tensor``, result number ``index`` of ``recipe``. ``None`` for its present version."""
        value = kind(tensor, on_death)
        value.recipe = recipe
        value.index = index
        value.version = version_of(tensor) if version is None else version
        value.address = storage_address(tensor)
        value.kept = value.dropped = None
        self._values[id(tensor)] = value
        self._new.append(value)
        return value

    def watch(self, value: Value, kept: Kept) -> None:
        """Remember that ``kept`` holds ``value``, and protect it from writes once a recipe ends on it."""
        value.kept = weakref.ref(kept)
        self._kept.setdefault(value.address, []).append(value.kept)

    def is_known(self, tensor: Tensor) -> bool:
        """Whether something on the memory of ``tensor`` is kept, or was, or its value is known."""
        return storage_address(tensor) in self._kept or self.find(tensor) is not None

    def before_write(self, target: Tensor, *, is_told: bool = True) -> None:
        """Save what recipes end on, and forget what other tensors on the memory of ``target`` hold.

        Args:
            target: What is going to be written.
            is_told: Whether its version will tell of it. If not, it is not taken for what it was, either.
        """
        address = storage_address(target)
        num_known = 1  # the target itself
        with self.paused():
            for reference in self._kept.get(address, ()):
                kept = reference()
                if kept is not None:
                    num_known += kept.holds_memory and kept.tensor is not target
                    kept.before_write()
        if address and count_storage_users(address) > num_known:
            for value in self._new:
                self._by_address.setdefault(value.address, []).append(value)
            self._new.clear()
            for value in self._by_address.pop(address, ()):
                if value() is not target:
                    value.version = NO_VERSION
        if not is_told and (known := self._values.pop(id(target), None)) is not None:
            known.version = NO_VERSION

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
