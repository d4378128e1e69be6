"""How to recompute a tensor.

A :class:`Value` stands for what one tensor held at one moment. Its :class:`Recipe` is the operator and the values that
the tensor was computed from.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.hooks import StoredTensor
from lightning_vram.core.random_state import Source, default_source
from lightning_vram.core.tensors.codecs import pack_bits, unpack_bits
from lightning_vram.core.tensors.properties import alias, check_version, stored_as, version_counter
from lightning_vram.private_names.torch import num_writes, outside_of_vmap


class Saved:
    """A tensor that is saved for backward: by autograd, as the end of a recipe, or both.

    :meth:`restore` serves autograd, and raises if it was overwritten; :meth:`read` gives recipes what it held then.
    ``taken``: what another stage, or a mask as bits, has of it: a snapshot, which no write reaches.
    """

    def __init__(self, tensor: Tensor, taken: StoredTensor | None) -> None:
        # An alias without grad_fn: the tensor itself would be a reference cycle through its node.
        self.tensor = alias(tensor) if taken is None else version_counter(tensor)
        self.version, self._shape = num_writes(tensor), tensor.shape
        self.taken = taken
        self.num_bytes = tensor.nbytes if taken is None else taken.num_bytes
        self.is_end = False  # of a recipe
        self.is_overwritten = False  # before a recipe ended on it: none will
        self._copy: Tensor | None = None

    def restore(self) -> Tensor:
        """Return it to the operator that saved it. Raises ``RuntimeError`` as autograd does if it was overwritten."""
        check_version(self.tensor, self.version, self._shape)
        return self.tensor if self.taken is None else self.taken.give()

    def read(self) -> Tensor:
        """Return what it held when it was saved."""
        if self.taken is not None:
            return self.taken.give()
        if self._copy is not None:
            return self._copy
        if num_writes(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} was overwritten between the training step and its "
                "backward, and dropped activations are recomputed from it. "
                "Overwrite it in the training step, or after the backward."
            )
        return self.tensor

    def before_write(self) -> None:
        """Copy it for the recipes that end on it: its memory is about to be overwritten."""
        if self.taken is not None and (self.is_end or self.taken.is_snapshot):
            self.taken.before_write()
        elif not self.is_end:
            self.is_overwritten = True  # maybe by the operator that saves it
        elif self._copy is None:
            self.copy()

    def copy(self) -> None:
        """Let recipes read what it holds now: the span of memory it covers, so that overlaps stay overlaps."""
        tensor = self.tensor
        if self.taken is not None:
            return
        if tensor.is_neg() or tensor.is_conj() or tensor.numel() == 0:
            self._copy = tensor.resolve_conj().resolve_neg().clone()
            return
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
        self._copy = span.as_strided(tensor.shape, tensor.stride(), 0)


class MaskBits(StoredTensor):
    """A mask as bits, which another stage may take over."""

    __slots__ = ("_bits", "_like")

    def __init__(self, mask: Tensor, hand_on: Callable[[Tensor], StoredTensor | None]) -> None:
        bits = pack_bits(mask)
        self._bits = hand_on(bits) or bits
        self._like = partial(torch.empty_strided, mask.shape, mask.stride(), dtype=mask.dtype, device=mask.device)

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return self._bits.num_bytes if isinstance(self._bits, StoredTensor) else self._bits.nbytes

    def give(self) -> Tensor:  # noqa: D102
        return unpack_bits(self._bits.give() if isinstance(self._bits, StoredTensor) else self._bits, self._like())


class Value(weakref.ref[Tensor]):
    """What a tensor held when it had ``version``; calling it gives the tensor while that lives.

    A weak reference with fields: one is made for every cheap operator, and a separate object is a microsecond more.
    Never compared: equality of weak references compares tensors.
    """

    __slots__ = ("__weakref__", "address", "dropped", "index", "recipe", "saved", "version")

    is_mask = False
    is_copy = False
    recipe: "Recipe | None"  # None: what it was made of is not known, or costly
    index: int  # among the results of its recipe
    version: int
    address: int  # of its storage
    saved: weakref.ref[Saved] | None
    dropped: "weakref.ref[Dropped] | None"

    def find_saved(self) -> Saved | None:
        """Return what saves it for backward, if something does."""
        saved = self.saved() if self.saved is not None else None
        return saved if saved is not None and not saved.is_overwritten else None

    def find_dropped(self) -> "Dropped | None":
        """Return what will recompute it, if it was dropped."""
        return self.dropped() if self.dropped is not None else None


@dataclass(slots=True, weakref_slot=True, eq=False)
class Dropped:
    """A tensor that autograd saved and that is recomputed in its backward."""

    value: Value
    sources: "list[Saved | Dropped]"  # keeps them alive
    depth: int  # operators to run one after the other
    counter: Tensor
    version: int
    shape: torch.Size
    num_saved: int = 0  # operators that will ask for it
    num_waiting: int = 0  # those that have not yet
    cache: Tensor | None = None  # made, and more that wait for it


class MaskValue(Value):
    """A mask of zeros and ones, or of zeros and one scale: it is saved as bits."""

    __slots__ = ("is_scaled",)
    is_mask = True
    is_scaled: bool


class CopyValue(Value):
    """The result of ``clone``: recomputed only if it is autograd's own, to which NumPy or an extension cannot write."""

    __slots__ = ()
    is_copy = True


@dataclass(slots=True, eq=False)
class Recipe:
    """One call of a cheap operator, or of a function below, with values in the place of tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None
    inputs: list[Value]
    position: int = 0  # among the cheap operators of one run
    depth: int = 1  # views cost nothing
    key: int | None = None
    is_used: bool = False  # to make a dropped tensor
    held: list[Saved | Dropped] | None = None  # inputs that would be gone before the result is saved
    siblings: list[weakref.ref[Value]] | None = None
    # The in-place form leaves those of its target, and kernels round by strides: a vectorised loop not as its rest.
    strides: tuple[int, ...] | None = None

    def identify(self) -> int:
        """Return a number for the operators it consists of and their places in the run, down to what is costly."""
        waiting = [self]
        while waiting:  # not recursive: chains may be long
            recipe = waiting[-1]
            sources = [source.recipe for source in recipe.inputs]
            unknown = [source for source in sources if source is not None and source.key is None]
            if not unknown:
                keys = [source.key if source is not None else 0 for source in sources]
                recipe.key = hash((id(recipe.function), recipe.position, *keys))
                waiting.pop()
            waiting.extend(unknown)
        assert self.key is not None
        return self.key

    def run(self, args: list[Any]) -> Any:
        """Call the operator on rebuilt arguments; returns what it returns."""
        result = self.function(*args, **self.kwargs) if self.kwargs else self.function(*args)
        return result if self.strides is None else stored_as(result, self.strides)


aten = torch.ops.aten


def batch_norm(
    function: Any, running: tuple[torch.Size, torch.dtype, torch.device] | None, /, *args: Any, **kwargs: Any
) -> Any:
    """Recompute a call of a batch norm, without updating its running statistics, which ``running`` describes, again."""
    if running is not None:  # whether there are any, and their dtype, decides how the kernel rounds
        shape, dtype, device = running
        args = (*args[:3], *(torch.ones(shape, dtype=dtype, device=device) for _ in range(2)), *args[5:])
    return function(*args, **kwargs)


# Dropout is recomputed from its mask, saved as bits (1/32 of the bytes on the host, 1/8 on a GPU), or from the state
# its generator had (a few bytes on a GPU, 5 KB on the host): drawing again takes more time than reading bits.


def dropout(source: Tensor, mask: Tensor, probability: float) -> Tensor:
    """Recompute the first result of ``native_dropout``."""
    if probability >= 1:
        scale = 0.0
    elif source.dtype is torch.float64:
        scale = 1 / (1 - probability)
    elif source.device.type == "cpu":  # rounded to the dtype on the host, to float32 on a GPU
        scale = float(torch.tensor(1 / (1 - probability), dtype=source.dtype))
    else:
        scale = float(1 / torch.tensor(1 - probability, dtype=torch.float32))
    return source * mask * scale


def note_draw(
    function: Any, like: Tensor, probability: float, generator: torch.Generator | None = None
) -> Recipe | None:
    """Return how to draw again the mask that ``function`` is about to draw; ``None`` without a settable generator."""
    source = (generator.get_state, generator.set_state) if generator is not None else default_source(like.device)
    if source is None:
        return None
    new = partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)
    draw = partial(aten.bernoulli_.float, p=probability, generator=generator)
    if function is not aten.bernoulli_.float:
        draw = partial(function, p=probability, train=True)
    return Recipe(draw_again, (draw, new, source[0](), source), None, [])


def draw_again(draw: Callable[[Tensor], Any], new: Callable[[], Tensor], state: Any, source: Source) -> Any:
    """Draw a mask from the state its generator had."""
    read, write = source
    with outside_of_vmap():  # a batched backward draws what the forward drew
        now = read()
        write(state)
        try:
            return draw(new())
        finally:
            write(now)
