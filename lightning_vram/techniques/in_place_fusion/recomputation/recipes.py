"""How a tensor was made.

A :class:`Value` stands for what one tensor held at one moment. Its :class:`Recipe` names the operator and the values it
was made of.
"""

import weakref
from typing import Any

from torch import Tensor

from lightning_vram.core.tensors.layout import stored_as
from lightning_vram.core.tensors.versions import version_counter
from lightning_vram.private_names.torch.tensors import num_writes
from lightning_vram.techniques.in_place_fusion.recomputation.kept import Kept


class Value(weakref.ref[Tensor]):
    """What a tensor held when it had ``version``; calling it gives the tensor while that lives.

    A weak reference with fields, since one is made for every cheap operator: the two objects it saves are a
    microsecond. Made by ``RecipeNotes``. Never compared: equality of weak references compares tensors.
    """

    __slots__ = ("__weakref__", "address", "dropped", "index", "kept", "recipe", "version")

    is_mask = False
    is_copy = False
    recipe: "Recipe | None"  # None: what it was made of is not known, or costly
    index: int  # among the results of its recipe
    version: int
    address: int  # of its storage
    kept: weakref.ref[Kept] | None
    dropped: "weakref.ref[Dropped] | None"

    def find_kept(self) -> Kept | None:
        """Return what keeps it alive for backward as it is, if something does."""
        kept = self.kept() if self.kept is not None else None
        return kept if kept is not None and not kept.is_overwritten else None

    def find_dropped(self) -> "Dropped | None":
        """Return what will make it again, if it was dropped."""
        return self.dropped() if self.dropped is not None else None


class Dropped:
    """A tensor that autograd saved and that is made again when its backward comes."""

    __slots__ = (
        *("__weakref__", "cache", "counter", "depth", "num_saved", "num_waiting"),
        *("shape", "sources", "value", "version"),
    )

    def __init__(self, value: Value, sources: "list[Kept | Dropped]", depth: int, tensor: Tensor) -> None:
        self.value = value
        self.sources = sources  # keeps them alive
        self.depth = depth  # operators to run one after the other
        self.counter = version_counter(tensor)
        self.version = num_writes(tensor)
        self.shape = tensor.shape
        self.num_saved = 0
        self.num_waiting = 0
        self.cache: Tensor | None = None  # made, and more that wait for it

    def save(self) -> "Dropped":
        """Note one more operator that will ask for it."""
        self.num_saved += 1
        self.num_waiting += 1
        return self


class MaskValue(Value):
    """A value of zeros and ones, or what a scale has made of the ones since: it is kept as bits."""

    __slots__ = ("is_scaled",)
    is_mask = True
    is_scaled: bool


class CopyValue(Value):
    """The result of ``clone``: autograd's own, if it is saved at once and nobody else has it.

    A user's own is memory that something other than an operator may write to (NumPy, an extension); no recipe is
    believed then.
    """

    __slots__ = ()
    is_copy = True


class Recipe:
    """One call of a cheap operator, with values in the place of tensors."""

    __slots__ = ("args", "depth", "function", "held", "inputs", "is_used", "key", "kwargs", "position", "siblings")

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, inputs: list[Value], depth: int = 1
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.depth = depth  # views cost nothing
        self.position = 0  # among the cheap operators of one run
        self.key: int | None = None
        self.is_used = False  # to make a dropped tensor
        self.held: list[Kept | Dropped] | None = None  # inputs that would be gone before the result is saved
        self.siblings: list[weakref.ref[Value]] | None = None

    def identify(self) -> int:
        """Return a number for the operators it consists of and their places in the run, down to what is costly."""
        waiting = [self]
        while waiting:  # not recursive: chains may be long
            recipe = waiting[-1]
            sources = [source.recipe for source in recipe.inputs]
            unknown = [source for source in sources if source is not None and source.key is None]
            if unknown:
                waiting.extend(unknown)
                continue
            keys = [source.key if source is not None else 0 for source in sources]
            recipe.key = hash((id(recipe.function), recipe.position, *keys))
            waiting.pop()
        assert self.key is not None
        return self.key

    def run(self, args: list[Any]) -> Any:
        """Call the operator on rebuilt arguments; returns what it returns."""
        return self.function(*args, **self.kwargs) if self.kwargs else self.function(*args)


class WriteRecipe(Recipe):
    """One call of an operator in place, with the functional form in its place.

    The in-place form leaves the strides of its target, whatever they are, and kernels round by strides: a vectorised
    loop not as the loop over what is left.
    """

    __slots__ = ("_strides",)

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, inputs: list[Value], target: Tensor
    ) -> None:
        super().__init__(function, args, kwargs, inputs)
        self._strides = target.stride()

    def run(self, args: list[Any]) -> Any:  # noqa: D102
        return stored_as(super().run(args), self._strides)
