"""How to recompute a tensor.

A :class:`Value` stands for what one tensor held at one moment. Its :class:`Recipe` is the operator and the values that
the tensor was computed from.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.hooks import StoredTensor
from lightning_vram.core.operators import Family, family_of
from lightning_vram.core.random_state import Source, default_source
from lightning_vram.core.tensors.codecs import pack_bits, unpack_bits
from lightning_vram.core.tensors.properties import (
    NO_VERSION,
    PARAMETER_CLASSES,
    check_version,
    is_strided,
    stored_as,
    version_counter,
    version_of,
)
from lightning_vram.private_names.dispatcher import (
    BATCH_NORM,
    BATCH_NORM_WITHOUT_STATISTICS,
    FakeTensor,
    without_dispatch,
)
from lightning_vram.private_names.torch import num_writes, outside_of_vmap


class Saved:
    """A tensor that is saved for backward: by autograd, as the end of a recipe, or both.

    :meth:`restore` serves autograd, and raises if it was overwritten; :meth:`read` gives recipes what it held then.
    """

    __slots__ = ("__weakref__", "_copy", "is_end", "is_overwritten", "num_bytes", "tensor", "version")

    holds_memory = True  # of the tensor itself

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor = tensor  # an alias without grad_fn: the tensor itself would be a reference cycle through its node
        self.version = version
        self.num_bytes = tensor.nbytes
        self.is_end = False  # of a recipe
        self.is_overwritten = False  # before a recipe ended on it: none will
        self._copy: Tensor | None = None

    @property
    def is_exact(self) -> bool:
        """Whether reading it is bit-exact."""
        return True

    def restore(self) -> Tensor:
        """Return it to the operator that saved it. Raises ``RuntimeError`` as autograd does if it was overwritten."""
        check_version(self.tensor, self.version, self.tensor.shape)
        return self.tensor

    def read(self) -> Tensor:
        """Return what it held when it was saved."""
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
        if not self.is_end:
            self.is_overwritten = True
        elif self._copy is None:
            self.copy()

    def copy(self) -> None:
        """Let recipes read what it holds now: the span of memory it covers, so that overlaps stay overlaps."""
        tensor = self.tensor
        if tensor.is_neg() or tensor.is_conj() or tensor.numel() == 0:
            self._copy = tensor.resolve_conj().resolve_neg().clone()
            return
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
        self._copy = span.as_strided(tensor.shape, tensor.stride(), 0)


class SavedElsewhere(Saved):
    """A tensor that another stage took over: a snapshot, which no write reaches."""

    holds_memory = False

    __slots__ = ("_shape", "_taken")

    def __init__(self, tensor: Tensor, taken: StoredTensor) -> None:
        super().__init__(version_counter(tensor), num_writes(tensor))
        self._taken = taken
        self._shape = tensor.shape
        self.num_bytes = taken.num_bytes

    @property
    def is_exact(self) -> bool:  # noqa: D102
        return self._taken.is_exact

    def restore(self) -> Tensor:  # noqa: D102
        check_version(self.tensor, self.version, self._shape)
        return self._taken.give()

    def read(self) -> Tensor:  # noqa: D102
        return self._taken.give()

    def before_write(self) -> None:  # noqa: D102
        if self.is_end or self._taken.is_snapshot:
            self._taken.before_write()
        else:
            self.is_overwritten = True  # by the operator that saves it, or by a later one

    def copy(self) -> None:  # noqa: D102
        return


class SavedMask(Saved):
    """A mask that is saved as bits, by itself or by another stage."""

    holds_memory = False

    __slots__ = ("_bits", "_device", "_shape", "_strides")

    def __init__(self, mask: Tensor, hand_on: Callable[[Tensor], StoredTensor | None]) -> None:
        super().__init__(version_counter(mask), num_writes(mask))
        bits = pack_bits(mask)
        taken = hand_on(bits)
        self._bits = taken if taken is not None else bits
        self._shape, self._strides, self._device = mask.shape, mask.stride(), mask.device
        self.num_bytes = taken.num_bytes if taken is not None else bits.nbytes

    def restore(self) -> Tensor:  # noqa: D102
        check_version(self.tensor, self.version, self._shape)
        return self.read()

    def read(self) -> Tensor:  # noqa: D102
        like = torch.empty_strided(self._shape, self._strides, dtype=self.tensor.dtype, device=self._device)
        return unpack_bits(self._bits.give() if isinstance(self._bits, StoredTensor) else self._bits, like)

    def before_write(self) -> None:  # noqa: D102
        return  # the bits are its own


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


class Dropped:
    """A tensor that autograd saved and that is recomputed in its backward."""

    __slots__ = (
        *("__weakref__", "cache", "counter", "depth", "num_saved", "num_waiting"),
        *("shape", "sources", "value", "version"),
    )

    def __init__(self, value: Value, sources: "list[Saved | Dropped]", depth: int, tensor: Tensor) -> None:
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
    """A mask of zeros and ones, or of zeros and one scale: it is saved as bits."""

    __slots__ = ("is_scaled",)
    is_mask = True
    is_scaled: bool


class CopyValue(Value):
    """The result of ``clone``: autograd's own, if it is saved at once and nobody else has it.

    A user's own may be written to by something other than an operator (NumPy, an extension): no recipe is used then.
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
        self.held: list[Saved | Dropped] | None = None  # inputs that would be gone before the result is saved
        self.siblings: list[weakref.ref[Value]] | None = None

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
        return self.function(*args, **self.kwargs) if self.kwargs else self.function(*args)


class WriteRecipe(Recipe):
    """One call of an in-place operator, with its functional form.

    The in-place form leaves the strides of its target, and kernels round by strides: a vectorised loop not as its rest.
    """

    __slots__ = ("_strides",)

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, inputs: list[Value], target: Tensor
    ) -> None:
        super().__init__(function, args, kwargs, inputs)
        self._strides = target.stride()

    def run(self, args: list[Any]) -> Any:  # noqa: D102
        return stored_as(super().run(args), self._strides)


# A batch norm is recomputed bit-exactly, without updating its running statistics again: by the same kernel on other
# running statistics, or by one elementwise pass from the saved statistics, a third of the time, where the kernel rounds
# as the formula does. That is tried once per process on a million random numbers, a few at a time: a backward runs.

aten = torch.ops.aten
_TRAINING = 5  # position of ``training`` among the arguments of all batch norms, except ``no_stats``
_NUM_TRIED = 1_000_000
# By dimensions. Channels and places fill vectors of the host, and a rest of one.
_TRIED_AT_ONCE = {2: [20, 109], 3: [2, 29, 37], 4: [2, 29, 3, 13], 5: [2, 29, 2, 3, 7]}


class BatchNormRecipe(Recipe):
    """One call of a batch norm, in training or evaluation."""

    __slots__ = ("running", "statistics")

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, inputs: list[Value]
    ) -> None:
        super().__init__(function, args, kwargs, inputs)
        self.statistics: tuple[Tensor, Tensor] | None = None  # mean and inverse deviation [C]: the backward saves them
        # of other running statistics to update: whether there are any, and their dtype, decides how the kernel rounds
        self.running: tuple[torch.Size, torch.dtype, torch.device] | None = None

    @override
    def run(self, args: list[Any]) -> Any:
        x, weight, bias = args[0], args[1], args[2]
        if (
            self.statistics is not None
            and (type(x) is Tensor or (type(x) is FakeTensor and x.is_cpu))  # no kernel of a card can be tried
            and _formula_is_exact(_kernel_of(self.function, x, weight, bias))
        ):
            return (_normalise(x, weight, bias, *self.statistics),)
        if self.running is not None:
            shape, dtype, device = self.running
            args[3], args[4] = (torch.ones(shape, dtype=dtype, device=device) for _ in range(2))
        return super().run(args)


def recomputation_call(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...], bool]:
    """Return operator and arguments that recompute a batch norm, and whether it normalizes by its batch."""
    is_training = function is BATCH_NORM_WITHOUT_STATISTICS or bool(args[_TRAINING])
    if is_training and function is not BATCH_NORM_WITHOUT_STATISTICS:
        args = (*args[:3], None, None, *args[5:])  # running statistics must not be updated again
    return (aten.native_batch_norm.default if function is BATCH_NORM else function), args, is_training


def _normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, deviation: Tensor) -> Tensor:
    """Scale and shift ``x`` ``[N, C, ...]`` with fused multiply-adds, as the kernel of the host does."""
    scale = deviation * weight if weight is not None else deviation
    shift = torch.addcmul(bias, mean, scale, value=-1) if bias is not None else -mean * scale
    shape = [1, -1, *[1] * (x.dim() - 2)]
    return torch.addcmul(shift.view(shape), x, scale.view(shape))


class _Kernel(NamedTuple):
    """All that decides how a kernel rounds."""

    function: Any
    device: torch.device
    dim: int
    is_contiguous: bool
    is_channels_last: bool
    dtypes: tuple[torch.dtype | None, ...]  # of input, weight and bias


def _kernel_of(function: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> _Kernel:
    dtypes = (x.dtype, *(parameter.dtype if parameter is not None else None for parameter in (weight, bias)))
    is_channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return _Kernel(function, x.device, x.dim(), x.is_contiguous(), is_channels_last, dtypes)


@cache
def _formula_is_exact(kernel: _Kernel) -> bool:
    """Whether :func:`_normalise` gives the bits of the kernel, tried on a million random numbers."""
    dtype, shape = kernel.dtypes[0], _TRIED_AT_ONCE.get(kernel.dim)
    is_known = dtype in (torch.float32, torch.float64) and set(kernel.dtypes) <= {dtype, None}
    if shape is None or not is_known or not (kernel.is_contiguous or kernel.is_channels_last):
        return False
    if kernel.device.type == "meta":
        return True
    with without_dispatch():  # on real tensors, and seen by nobody: it is tried once per process
        generator = torch.Generator(kernel.device).manual_seed(0)
        num_tries = -(-_NUM_TRIED // math.prod(shape))
        return all(_is_exact_once(kernel, shape, generator) for _ in range(num_tries))


def _is_exact_once(kernel: _Kernel, shape: list[int], generator: torch.Generator) -> bool:
    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=kernel.dtypes[0], device=kernel.device)

    x = random(*shape).mul_(3).add_(1)
    if not kernel.is_contiguous:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (random(shape[1]) if kernel.dtypes[index] is not None else None for index in (1, 2))
    training, momentum, eps = True, 0.1, 1e-5
    result, mean, deviation = kernel.function(x, weight, bias, None, None, training, momentum, eps)[:3]
    ours = _normalise(x, weight, bias, mean, deviation)
    return ours.stride() == result.stride() and torch.equal(ours, result)


# Dropout is recomputed from its mask, saved as bits (1/32 of the bytes on the host, 1/8 on a GPU), or from the state
# its generator had (a few bytes on a GPU, 5 KB on the host): drawing again takes more time than reading bits.


class DropoutRecipe(Recipe):
    """The first result of ``native_dropout``: the input times the mask times the scale."""

    __slots__ = ()

    def __init__(self, source: Value, mask: Value, probability: float) -> None:
        super().__init__(aten.native_dropout.default, (source, mask, probability), None, [source, mask])

    @override
    def run(self, args: list[Any]) -> Tensor:
        source, mask, probability = args
        return source * mask * _scale(probability, source)  # type: ignore[no-any-return]


class DrawRecipe(Recipe):
    """A mask, drawn again from the state its generator had."""

    __slots__ = ("_generator", "_new", "_probability", "_source", "_state")

    def __init__(
        self, function: Any, like: Tensor, probability: float, generator: torch.Generator | None, source: Source
    ) -> None:
        super().__init__(function, (), None, [])
        self._generator, self._source = generator, source
        self._state = source[0]()
        self._probability = probability
        self._new = partial(torch.empty_strided, like.shape, like.stride(), dtype=like.dtype, device=like.device)

    @override
    def run(self, args: list[Any]) -> Any:
        read, write = self._source
        with outside_of_vmap():  # a batched backward draws what the forward drew
            now = read()
            write(self._state)
            try:
                if self.function is aten.bernoulli_.float:
                    return self._new().bernoulli_(self._probability, generator=self._generator)
                return self.function(self._new(), p=self._probability, train=True)
            finally:
                write(now)


def note_draw(
    function: Any, like: Tensor, probability: float, generator: torch.Generator | None = None
) -> DrawRecipe | None:
    """Return how to draw again the mask that ``function`` is about to draw; ``None`` without a settable generator."""
    source = (generator.get_state, generator.set_state) if generator is not None else default_source(like.device)
    return DrawRecipe(function, like, probability, generator, source) if source is not None else None


def _scale(probability: float, like: Tensor) -> float:
    """What the kernels scale by: rounded to the dtype on the host, to float32 on a GPU."""
    if probability >= 1:
        return 0.0
    if like.dtype is torch.float64:
        return 1 / (1 - probability)
    if like.device.type == "cpu":
        return float(torch.tensor(1 / (1 - probability), dtype=like.dtype))
    return float(1 / torch.tensor(1 - probability, dtype=torch.float32))


class HoldingCosts:
    """What it costs in one run to end a recipe on a value. ``parameters_move``: FSDP frees them between forwards."""

    def __init__(self, buffers: set[int], *, parameters_move: bool) -> None:
        self.buffers = buffers
        self._parameters_move = parameters_move

    def is_free(self, value: Value, tensor: Tensor) -> bool:
        """Whether the memory of ``value`` stays anyway, ``tensor`` being its tensor or what that is a view of."""
        return type(tensor) in PARAMETER_CLASSES or value.address in self.buffers

    def can_hold(self, source: Value) -> bool:
        """Whether a recipe can end here: it is saved or dropped already, or still there as it was."""
        if source.find_saved() is not None or source.find_dropped() is not None:
            return True
        origin = source()
        if origin is None or source.version == NO_VERSION or source.version != version_of(origin):
            return False
        return is_strided(origin) and not (self._parameters_move and type(origin) in PARAMETER_CLASSES)

    def is_worth_it(self, sources: Iterable[Value], tensor: Tensor, recipe: Recipe) -> bool:
        """Whether what would be saved for these sources alone is less than ``tensor``."""
        cost = 0
        for source in sources:
            origin = source()
            if source.find_saved() is not None or source.find_dropped() is not None:
                continue
            if origin is None or not self.can_hold(source):
                return False
            if not self.is_free(source, origin):
                cost += origin.numel() // 8 if source.is_mask else origin.nbytes
        if cost == tensor.nbytes:  # inputs of ``cat`` and of views are often saved later anyway
            return cost == 0 or recipe.function is aten.cat.default or family_of(recipe.function) is Family.VIEW
        return cost < tensor.nbytes or cost == 0

    def owns_memory(self, recipe: Recipe) -> bool:
        """Whether a result is more than a view of what is saved anyway or counts as dropped already."""
        if recipe.depth > 0:
            return True
        base = recipe.inputs[0]
        while base.recipe is not None and base.recipe.depth == 0:
            base = base.recipe.inputs[0]
        origin = base()
        is_free = origin is not None and self.is_free(base, origin)
        return not is_free and base.find_saved() is None and base.find_dropped() is None
