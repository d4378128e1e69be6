"""How a tensor was made, what is kept to make it again, and making it again.

A :class:`Value` stands for what one tensor held at one moment. Its :class:`Recipe` names the operator and the values
it was made of. The values that recipes end on are :class:`Kept`; a value that is :class:`Dropped` is rebuilt from
them when the backward asks for it.
"""

import weakref
from collections import Counter
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_vram.techniques.cheap_operators import in_place_form
from lightning_vram.techniques.mask_bits import pack_bits, unpack_bits

_MAX_STEPS = 400  # values looked at to find the ends of one recipe: long chains of views end here
_MAX_LEVELS = 100  # of recursion
NO_VERSION = -1


class Value(weakref.ref[Tensor]):
    """What a tensor held when it had ``version``; calling it gives the tensor while that lives.

    A weak reference with fields, since one is made for every cheap operator: the two objects it saves are a
    microsecond. Made by ``NotedValues``. Never compared: equality of weak references compares tensors.
    """

    __slots__ = ("__weakref__", "address", "dropped", "index", "kept", "recipe", "version")

    is_mask = False
    is_copy = False
    recipe: "Recipe | None"  # None: what it was made of is not known, or costly
    index: int  # among the results of its recipe
    version: int
    address: int  # of its storage
    kept: "weakref.ref[Kept] | None"
    dropped: "weakref.ref[Dropped] | None"

    def find_kept(self) -> "Kept | None":
        """Return what keeps it alive for backward as it is, if something does."""
        kept = self.kept() if self.kept is not None else None
        return kept if kept is not None and not kept.is_overwritten else None

    def find_dropped(self) -> "Dropped | None":
        """Return what will make it again, if it was dropped."""
        return self.dropped() if self.dropped is not None else None


class MaskValue(Value):
    """A value of zeros and ones, or what a scale has made of the ones since: it is kept as bits."""

    __slots__ = ("is_scaled",)
    is_mask = True
    is_scaled: bool


def storage_address(tensor: Tensor) -> int:
    """Return what all views of one memory have in common; 0 for tensors without one piece of memory (sparse)."""
    try:
        return torch._C._storage_address(tensor)  # type: ignore[attr-defined, no-any-return]
    except (NotImplementedError, RuntimeError):
        return 0


def is_strided(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary one: its bytes are its elements."""
    return tensor.layout is torch.strided and not tensor.is_nested


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written to; :data:`NO_VERSION` if it is an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return NO_VERSION


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
        result = super().run(args)
        if result.stride() == self._strides:
            return result
        return torch.empty_strided(result.shape, self._strides, dtype=result.dtype, device=result.device).copy_(result)


class Kept:
    """A tensor that is kept for backward: saved by autograd, or the end of somebody's recipe, or both.

    Autograd's own users see it through :meth:`restore`, with autograd's rule that it must not have been overwritten.
    Recipes see what it held when it was kept: :meth:`make_private` copies it before it is overwritten.
    """

    __slots__ = ("__weakref__", "_copy", "is_end", "is_overwritten", "num_bytes", "tensor", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor = tensor  # an alias without grad_fn: the tensor itself would be a reference cycle through its node
        self.version = version
        self.num_bytes = tensor.nbytes
        self.is_end = False  # of a recipe
        self.is_overwritten = False  # before a recipe ended on it: none will
        self._copy: Tensor | None = None

    def restore(self) -> Tensor:
        """Return it to the operator that saved it. Raises ``RuntimeError`` as autograd does if it was overwritten."""
        check_version(self.tensor, self.version, self.tensor)
        return self.tensor

    def read(self) -> Tensor:
        """Return what it held when it was kept."""
        if self._copy is not None:
            return self._copy
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} was overwritten between the training step and its "
                "backward, and activations that were dropped to save memory are made again from it. "
                "Overwrite it in the training step, or after the backward."
            )
        return self.tensor

    def before_write(self) -> None:
        """Copy it for the recipes that end on it: its memory is about to be overwritten."""
        if not self.is_end or self._copy is not None:
            self.is_overwritten = not self.is_end
            return
        self._copy = _copy(self.tensor)


class KeptMask(Kept):
    """A mask that is kept as bits."""

    __slots__ = ("_bits", "_one", "_shape", "_strides")

    def __init__(self, mask: Tensor) -> None:
        super().__init__(version_counter(mask), mask._version)
        self._bits = pack_bits(mask)
        self._shape, self._strides = mask.shape, mask.stride()
        self.num_bytes = self._bits.nbytes

    def restore(self) -> Tensor:  # noqa: D102
        check_version(self.tensor, self.version, self.tensor)
        return self.read()

    def read(self) -> Tensor:  # noqa: D102
        like = torch.empty_strided(self._shape, self._strides, dtype=self.tensor.dtype, device=self._bits.device)
        return unpack_bits(self._bits, like)

    def before_write(self) -> None:  # noqa: D102
        return  # the bits are its own


def _copy(tensor: Tensor) -> Tensor:
    """Copy values and strides: the span of memory it covers, so that overlaps stay overlaps."""
    if tensor.is_neg() or tensor.is_conj() or tensor.numel() == 0:
        return tensor.resolve_conj().resolve_neg().clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return span.as_strided(tensor.shape, tensor.stride(), 0)


class Dropped:
    """A tensor that autograd saved and that is made again when its backward comes."""

    __slots__ = (
        "__weakref__",
        "_counter",
        "_num_saved",
        "_sources",
        "_value",
        "_version",
        "cache",
        "depth",
        "num_waiting",
    )

    def __init__(self, value: Value, sources: "list[Kept | Dropped]", depth: int, tensor: Tensor) -> None:
        self._value = value
        self._sources = sources  # keeps them alive
        self.depth = depth  # operators to run one after the other
        self._counter = version_counter(tensor)
        self._version = tensor._version
        self._num_saved = 0
        self.num_waiting = 0
        self.cache: Tensor | None = None  # made, and more that wait for it

    def save(self) -> "Dropped":
        """Note one more operator that will ask for it."""
        self._num_saved += 1
        self.num_waiting += 1
        return self

    def restore(self) -> Tensor:
        """Make it again, once for all that wait. Raises ``RuntimeError`` as autograd does if it was overwritten."""
        check_version(self._counter, self._version, self._counter)
        if self.num_waiting == 0:
            self.num_waiting = self._num_saved  # a retained graph asks again
        tensor = rebuild(self._value)
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.cache = None
        return tensor


def version_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the version counter of ``tensor``: it tells of writes and holds no memory."""
    counter = alias(tensor)
    counter.data = _nothing(tensor.dtype, tensor.device)
    return counter


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def alias(tensor: Tensor) -> Tensor:
    """Return another tensor on the same memory and version counter, without a past and deaf to ``.data =``."""
    key = torch._C.DispatchKey.ADInplaceOrView
    if torch._C._dispatch_tls_is_dispatch_key_excluded(key):  # below autograd an alias would count versions on its own
        is_excluded = False
        with torch._C._SetExcludeDispatchKeyGuard(key, is_excluded):
            return _detach(tensor)
    return _detach(tensor)


def _detach(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        with torch._C._DisableTorchDispatch():  # nobody needs to see it
            return tensor.detach()
    return tensor.detach()


def check_version(counter: Tensor, expected: int, tensor: Tensor) -> None:
    """Raise autograd's error if a saved tensor was overwritten: its own check is off while hooks are set."""
    if counter._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {counter._version}; expected version {expected} "
            "instead."
        )


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


def rebuild(value: Value, *, is_trial: bool = False) -> Tensor:
    """Make ``value`` again, in the strides it had. To be called without gradients and outside of autocast.

    Args:
        value: What to make.
        is_trial: Leave nothing behind for those that wait for the values on the way.
    """
    return _Rebuilding(value, is_trial=is_trial).make(value)


class _Rebuilding:
    """One walk back to the ends; what it needs more than once it makes once and holds no longer than needed."""

    def __init__(self, value: Value, *, is_trial: bool) -> None:
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
        is_first = self._num_uses[id(value)] == 1
        if is_first and value.recipe is not None and value.find_kept() is None and not _has_cache(value):
            for source in value.recipe.inputs:
                self._count(source)

    def _run(self, value: Value) -> Tensor:
        recipe = value.recipe
        assert recipe is not None, "a recipe ended on a value that nobody kept"
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


def _has_cache(value: Value) -> bool:
    dropped = value.find_dropped()
    return dropped is not None and dropped.cache is not None
