"""What is known of PyTorch's operators: which are cheap, which write, what they cost, which arguments must be exact.

Cost is counted in FLOP equivalents, to rank the operators of one model: the slower of arithmetic and memory traffic, of
which a byte is worth :data:`BALANCE` FLOPs. Caches and launches are ignored. Cheap (:func:`family_of`) means: no matrix
product, convolution, attention or random numbers, and the same bits from the same inputs. Names that this torch does
not have do no harm. May import: memory.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from lightning_vram.private_names import dispatcher
from lightning_vram.private_names.dispatcher import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    overload_name,
    schema_of,
)
from lightning_vram.private_names.torch import tensors_in

_num_alike = 1


def parts_of(num_rows: int, part_rows: int, tensor: Tensor) -> Iterator[slice]:
    """Yield the rows of each part, to be freed before the next; of fakes, the first part stands for all whole ones."""
    global _num_alike
    if not isinstance(tensor, FakeTensor):
        yield from (slice(start, min(start + part_rows, num_rows)) for start in range(0, num_rows, part_rows))
        return
    num_whole, rest = divmod(num_rows, part_rows)
    try:
        if num_whole:
            _num_alike = num_whole
            yield slice(0, part_rows)
            _num_alike = 1
        if rest:
            yield slice(num_rows - rest, num_rows)
    finally:
        _num_alike = 1


def num_alike() -> int:
    """Return how many parts the current one stands for."""
    return _num_alike


BALANCE = 160.0
"""FLOPs a GPU does in the time it moves one byte.

By the makers' sheets (bf16, accumulated in fp32): A100 153, RTX 4090 164, H200 206, B200 281, H100 295. Real matrix
products reach about 0.6 of their peak, elementwise kernels about 0.85: so 145 to 210 for the newer ones.
"""


def _names(namespace: str, *names: str) -> frozenset[str]:
    return frozenset(f"{namespace}::{name}" for name in " ".join(names).split())


# Two FLOPs per element of the result and per number in the last dimension of the left matrix.
_FLAT_PRODUCTS = _names("aten", "mm bmm addmm baddbmm mv dot vdot linear addmv", dispatcher.PRODUCTS)
_CONVOLUTIONS = _names("aten", "convolution", dispatcher.CONVOLUTION)
_RECURRENT = _names("aten", "miopen_rnn mkldnn_rnn_layer", dispatcher.RECURRENT)
MATMULS = _FLAT_PRODUCTS | _CONVOLUTIONS | _RECURRENT | _names("aten", "addbmm conv_tbc", dispatcher.OTHER_PRODUCTS)
"""Qualified names, without overload, of matrix products, convolutions and recurrent kernels."""

ATTENTION = _names("aten", dispatcher.ATTENTIONS) | _names("higher_order", "flex_attention")
"""Qualified names, without overload, of attention kernels in the forward."""

_FREE = _names(  # they give memory or numbers about tensors, and touch none
    "aten", "empty empty_like empty_strided new_empty new_empty_strided lift_fresh", dispatcher.VIEWS
)
# They read of a large table what they give. Counted by its size, a look-up would cost more than a layer.
_LOOKUPS = _names("aten", "embedding index index_select gather take slice_copy select_copy")
_LEFT_MATRIX_SECOND = _names("aten", "addmm baddbmm addmv", dispatcher.ACTIVATED_PRODUCT)


@dataclass(frozen=True)
class OperatorWork:
    """FLOPs, bytes read and written, and the number of calls: of a part that stands for others on fake tensors."""

    flops: int
    num_bytes: int
    num_calls: int = 1

    @property
    def cost(self) -> float:
        """In FLOP equivalents: the larger of the FLOPs and :data:`BALANCE` times the bytes."""
        return max(float(self.flops), BALANCE * self.num_bytes)


NO_WORK = OperatorWork(0, 0)


def operator_work(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> OperatorWork:
    """Estimate what one call of an operator, maybe a fake one, does; :data:`NO_WORK` for views and empty tensors."""
    name = _qualified_name(func)
    results = list(tensors_in(outputs))
    has_no_effect = not results and isinstance(func, OpOverload) and not schema_of(func).is_mutable
    if name in _FREE or has_no_effect or _is_view(func):
        return NO_WORK
    written_bytes = sum(map(_touched_bytes, results))
    touched = map(_touched_bytes, tensors_in((args, kwargs)))
    read_bytes = sum(min(size, written_bytes) if name in _LOOKUPS else size for size in touched)
    num_calls = num_alike()
    flops = _count_flops(func, args, kwargs, outputs)
    return OperatorWork(flops * num_calls, (read_bytes + written_bytes) * num_calls, num_calls)


def resolve_operators(names: Sequence[str]) -> frozenset[Any]:
    """Find operators, as a dispatch mode sees them, by the names they have under ``torch.ops``.

    Such as ``"aten.mm"`` (all its overloads), ``"aten.mm.default"``, ``"torch.ops.mylib.flash"``, or ``"aten::mm"``.

    Example:
        >>> sorted(str(operator) for operator in resolve_operators(["aten.dot"]))
        ['aten.dot.default', 'aten.dot.out']
    """
    if isinstance(names, str):
        raise TypeError(f"operators must be a list of names, got the string {names!r}. Write [{names!r}].")
    resolved: set[Any] = set()
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"operators must be names such as 'aten.mm', got {name!r} of type {type(name).__name__}.")
        found = find_overloads(name)
        if not found:
            raise ValueError(f"operators={name!r} is not an operator of torch.ops. {_suggest(name)}")
        resolved.update(found)
    return frozenset(resolved)


def find_overloads(name: str) -> list[Any]:
    """Return the operators with this name that this torch has."""
    namespace, *rest = name.replace("::", ".").removeprefix("torch.ops.").split(".")
    found: Any = None
    # Two or three parts and none private to Python: anything else would be an attribute of torch.ops, no operator.
    if len(rest) in (1, 2) and all(rest) and namespace.isidentifier() and not rest[0].startswith("__"):
        found = getattr(torch.ops, namespace)
        for part in rest:
            found = getattr(found, part, None)
    if isinstance(found, OpOverloadPacket):
        return [getattr(found, overload) for overload in found.overloads()]  # type: ignore[no-untyped-call]
    return [found] if isinstance(found, OpOverload | HigherOrderOperator) else []


def _suggest(name: str) -> str:
    known = sorted({known.partition(".")[0].replace("::", ".") for known in dispatcher.all_operator_names()})
    plain = name.replace("::", ".").removeprefix("torch.ops.")
    parts = plain.split(".")
    wanted = ".".join(parts[:2]) if len(parts) > 1 else f"aten.{plain}"
    close = difflib.get_close_matches(wanted, known, n=5, cutoff=0.7)
    hint = f"Close names: {', '.join(map(repr, close))}. " if close else ""
    return f"{hint}Write 'namespace.name' as under torch.ops, and import the library that defines it first."


@cache
def _qualified_name(func: Any) -> str:
    """``"aten::mm"``, without the overload."""
    if isinstance(func, OpOverload):
        return str(schema_of(func).name)
    return f"higher_order::{func.name()}" if isinstance(func, HigherOrderOperator) else ""  # type: ignore[no-untyped-call]


@cache
def _is_view(func: Any) -> bool:
    """Whether results share memory with arguments that are not written to."""
    if not isinstance(func, OpOverload):
        return False
    aliases = [result.alias_info for result in schema_of(func).returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _touched_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, an expanded one counted by its memory."""
    num_bytes = tensor.numel() * tensor.element_size()
    try:
        return min(num_bytes, tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have none
        return num_bytes


# Not a documented name: without it the formulas below and the bytes remain.
_FLOP_FORMULAS: Mapping[Any, Any] = getattr(flop_counter, "flop_registry", {})


def _count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    formula = _FLOP_FORMULAS.get(getattr(func, "overloadpacket", func))
    try:
        if formula is not None:
            return int(formula(*args, **kwargs, out_val=outputs))
        return _count_flops_without_formula(_qualified_name(func), args, outputs)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError):
        return 0  # other arguments than the formula knows: the bytes are counted all the same


def _count_flops_without_formula(name: str, args: Sequence[Any], outputs: Any) -> int:
    """Count what torch has no formula for, from the usual places of the operands."""
    if name in ATTENTION:  # [B, H, S, D] each: scores, then their product with the values
        query, key, value = (tensor.shape for tensor in args[:3])
        return 2 * int(prod(query[:-1])) * int(key[-2]) * int(query[-1] + value[-1])
    if name in _RECURRENT:  # every weight meets every row of the input
        weights = [tensor for tensor in tensors_in(args[1:]) if tensor.dim() == 2]
        num_rows: int = args[0].numel() // args[0].shape[-1]
        return sum(2 * tensor.numel() * num_rows for tensor in weights)
    result: Any = next(tensors_in(outputs), None)
    if name in _FLAT_PRODUCTS:
        return int(2 * result.numel() * args[name in _LEFT_MATRIX_SECOND].shape[-1])
    if name in _CONVOLUTIONS:  # weight [C_out, C_in / groups, *kernel]
        return int(2 * result.numel() * prod(args[1].shape[1:]))
    return 0


aten = torch.ops.aten


class Family(Enum):
    """The families of operators, by which recomputation treats them."""

    COSTLY = auto()  # or unknown: its results are kept
    ELEMENTWISE = auto()
    VIEW = auto()
    GROWING = auto()  # cheap, and its result may be larger than what it reads
    SEVERAL_RESULTS = auto()  # cheap; each result can be recomputed
    NORM = auto()  # cheap; the first result is the value, the others are small statistics
    BATCH_NORM = auto()  # a norm that moves running statistics
    DROPOUT = auto()
    BERNOULLI = auto()  # draws a mask of zeros and ones in place


_VIEWS = (
    "view t transpose permute expand squeeze unsqueeze slice select split split_with_sizes "
    "unbind detach alias narrow as_strided unfold view_as_real view_as_complex diagonal movedim unsafe_split "
    "unsafe_chunk unsafe_split_with_sizes"
)
# Reductions give little and are read by what follows; the others move or repeat numbers. No factories: ``zeros`` is
# what extensions write their results into, past all operators.
_OTHERS = (
    "mean sum amax amin var std linalg_vector_norm logsumexp argmax argmin any all glu avg_pool1d avg_pool2d "
    "avg_pool3d pixel_shuffle pixel_unshuffle channel_shuffle roll flip rot90 index_select gather tril triu "
    "index leaky_relu"  # of the last torch 2.11 does not say that it is pointwise
)
_GROWING = (
    "cat stack constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d repeat im2col embedding"
)
_SEVERAL_RESULTS = (
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d max min var_mean std_mean "
    "log_sigmoid_forward"
)
_NORMS = "native_layer_norm native_group_norm batch_norm_elemt"
_BATCH_NORMS = "native_batch_norm cudnn_batch_norm miopen_batch_norm"


def _overloads(*names: str) -> list[Any]:
    found = [function for name in " ".join(names).split() for function in find_overloads(f"aten.{name}")]
    return [function for function in found if not schema_of(function).is_mutable and _returns_tensors(function)]


def _returns_tensors(function: Any) -> bool:
    return all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema_of(function).returns)


_FAMILIES: dict[Any, Family] = {
    **dict.fromkeys(_overloads(_VIEWS, dispatcher.VIEWS), Family.VIEW),
    **dict.fromkeys(_overloads(_OTHERS, dispatcher.ELEMENTWISE), Family.ELEMENTWISE),
    **dict.fromkeys(_overloads(_GROWING, dispatcher.GROWING), Family.GROWING),
    **dict.fromkeys(_overloads(_SEVERAL_RESULTS, dispatcher.SEVERAL_RESULTS), Family.SEVERAL_RESULTS),
    **dict.fromkeys(_overloads(_NORMS, dispatcher.NORMS), Family.NORM),
    # Its schema says that it writes to the running statistics, which a second run does not do.
    **dict.fromkeys([*_overloads(_BATCH_NORMS, dispatcher.BATCH_NORMS), dispatcher.BATCH_NORM], Family.BATCH_NORM),
    aten.native_dropout.default: Family.DROPOUT,
    aten.bernoulli_.float: Family.BERNOULLI,
}


@cache
def family_of(function: Any) -> Family:
    """Return the family of ``function``, an operator overload."""
    if not isinstance(function, OpOverload):
        return Family.COSTLY  # a higher-order operator
    known = _FAMILIES.get(function)
    if known is not None:
        return known
    tags, schema = function.tags, schema_of(function)
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    is_functional = function.namespace == "aten" and not schema.is_mutable
    one_new_result = len(schema.returns) == 1 and schema.returns[0].alias_info is None and _returns_tensors(function)
    return Family.ELEMENTWISE if is_pointwise and is_functional and one_new_result else Family.COSTLY


_GIVE_BOOL = "eq ne lt gt ge le logical_and logical_or logical_xor logical_not"


@cache
def shares_version(function: Any) -> bool:
    """Whether autograd lets results share the version counter of the first argument, as views do."""
    return schema_of(function).returns[0].alias_info is not None


@cache
def functional_form(function: Any) -> Any | None:
    """Return the cheap operator that returns what ``function`` writes to its first argument: ``relu`` for ``relu_``."""
    name = base_name(function)
    is_in_place = function.namespace == "aten" and schema_of(function).name.endswith("_")
    form = getattr(getattr(aten, name, None), overload_name(function), None) if is_in_place else None
    if form is None or family_of(form) is not Family.ELEMENTWISE or name in _GIVE_BOOL.split():
        return None
    of_form, of_function = ([str(argument.type) for argument in schema_of(f).arguments] for f in (form, function))
    return form if of_form == of_function else None  # ``pow_.Scalar`` is not ``pow.Scalar``


@cache
def in_place_form(function: Any) -> Any | None:
    """Return the in-place operator of ``function``, an activation."""
    if function not in _ACTIVATIONS:
        return None
    return getattr(getattr(aten, base_name(function) + "_"), overload_name(function))


# The in-place form of these gives the same bits: the last of a chain is made in the memory of the one before.
_ACTIVATIONS = frozenset(_overloads("relu hardtanh silu leaky_relu hardswish elu gelu mish"))


@cache
def written_arguments(function: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that ``function`` writes to. Keyword-only ones count on from the others."""
    if not isinstance(function, OpOverload):
        return ()
    arguments = schema_of(function).arguments
    if function.namespace == "c10d":  # collectives write without saying so, and without a new version
        return tuple(range(len(arguments)))
    return tuple(i for i, argument in enumerate(arguments) if argument.is_write)


def iterate_written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterator[Tensor]:
    """Yield the tensors that this call of ``function`` writes to."""
    for position in written_arguments(function):
        name = schema_of(function).arguments[position].name
        target = args[position] if position < len(args) else (kwargs or {}).get(name)
        for tensor in target if isinstance(target, list | tuple) else (target,):
            if isinstance(tensor, Tensor):
                yield tensor
            elif isinstance(tensor, list | tuple):  # c10d: lists of lists
                yield from (item for item in tensor if isinstance(item, Tensor))


# Arguments or results whose error the backward magnifies, by PyTorch's ``derivatives.yaml``: it divides by them, takes
# their logarithm, compares them for equality (no match: 0 / 0), or their sign decides. Not listed: activations that
# branch on a sign (few elements are near the step), and products, norms and attention (an error in proportion).
# Of these, all tensors they get.
_ALL_NAMES = (
    "abs acos acosh addcdiv amax amin aminmax asin atan2 atanh binary_cross_entropy cholesky cholesky_inverse "
    "cholesky_solve copysign cosh cumprod digamma dist erfinv fmax fmin fmod huber_loss hypot igamma igammac "
    "index_reduce inverse lgamma log log10 log1p log2 logaddexp logaddexp2 logcumsumexp logit logsumexp lu_solve "
    "lu_unpack maximum minimum mse_loss mvlgamma nansum polygamma prod remainder renorm scatter_reduce "
    "segment_reduce sgn sinh smooth_l1_loss tan triangular_solve xlogy"
)
_ALL = {*_ALL_NAMES.split(), *dispatcher.EXACT_ARGUMENTS.split()}
_PREFIXES = ("linalg_", dispatcher.LINEAR_ALGEBRA, "special_")
# One of them. Its other arguments are only multiplied with.
_ONE = {"div": "other", dispatcher.DIVIDE_EACH: "other", "grid_sampler_2d": "grid", "grid_sampler_3d": "grid"}
_ONLY_WHOLE = frozenset(["max", "min", "median", "nanmedian"])  # with a ``dim`` the backward has indices
_MEASURING_NORMS = frozenset(["norm", "linalg_vector_norm", dispatcher.NORM_OF_EACH])

# Of what is saved of these: their first result. (Second results are always exact.)
_RESULTS_NAMES = (
    "aminmax amax amin cholesky cholesky_inverse cholesky_solve cumprod dist erfinv hypot index_reduce inverse "
    "logaddexp logcumsumexp logsumexp max mean median min nanmedian norm pow prod reciprocal renorm rsqrt "
    "scatter_reduce segment_reduce sqrt std sum tan var"
)
_RESULTS = frozenset([*_RESULTS_NAMES.split(), *dispatcher.EXACT_RESULTS.split()])


@cache
def base_name(function: Any) -> str:
    """Return the name of ``function``, an operator overload, without namespace and the underscore of in-place ones."""
    name: str = schema_of(function).name.partition("::")[2]
    return name[:-1] if name.endswith("_") else name


@cache
def exact_arguments(function: Any) -> Callable[[tuple[Any, ...], dict[str, Any] | None], Iterator[Tensor]] | None:
    """Return what yields those arguments of a call that its backward must find exact; ``None`` if there are none."""
    name = base_name(function)
    if function.namespace != "aten":
        return None
    if name in _MEASURING_NORMS:
        return lambda args, kwargs: iter(()) if _is_smooth_norm(args, kwargs) else tensors_in(args)
    if name == "pow":
        return lambda args, kwargs: iter(()) if _is_polynomial(args) else tensors_in(args)
    if name in _ONE:
        position = [argument.name for argument in schema_of(function).arguments].index(_ONE[name])
        return lambda args, kwargs: tensors_in(args[position : position + 1])
    is_whole = name in _ONLY_WHOLE and overload_name(function) == "default"
    if name in _ALL or is_whole or name.startswith(_PREFIXES):
        return lambda args, kwargs: tensors_in((*args, *(kwargs or {}).values()))
    return None


@cache
def gives_exact_result(function: Any) -> bool:
    """Whether the first result of ``function`` must be kept exactly, wherever it is saved."""
    name = base_name(function)
    if function.namespace != "aten" or (name in _ONLY_WHOLE and overload_name(function) != "default"):
        return False
    return name in _RESULTS or name.startswith(("linalg_", dispatcher.LINEAR_ALGEBRA))


def _is_smooth_norm(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    order = args[1] if len(args) > 1 else (kwargs or {}).get("ord")
    return order is None or order == 2


def _is_polynomial(args: tuple[Any, ...]) -> bool:
    base, exponent = args[:2]
    is_number = isinstance(exponent, int | float) and isinstance(base, Tensor)
    return is_number and exponent >= 1 and float(exponent).is_integer()


def is_constant(function: Any) -> bool:
    """Whether ``function`` makes a tensor from nothing: no random numbers, and no uninitialised memory."""
    return function.namespace == "aten" and base_name(function) in ("eye", "ones", "full", "linspace", "scalar_tensor")


def is_pointwise(function: Any) -> bool:
    """Whether each element of the result comes from one of each argument, or is one of them."""
    others = (dispatcher.COPY_TO, "clone", "cat", "stack", "leaky_relu")  # of the last torch 2.11 does not say so
    return torch.Tag.pointwise in function.tags or base_name(function) in others


LargestIndex = Callable[[tuple[Any, ...], dict[str, Any] | None], int]

_POOLS = ("max_pool{}d_with_indices", "adaptive_max_pool{}d", "fractional_max_pool{}d")
_ALONG_A_DIM = "max.dim min.dim sort.default sort.stable topk.default kthvalue.default median.dim nanmedian.dim "
_ALONG_A_DIM += "mode.default cummax.default cummin.default argmax.default argmin.default argsort.stable"


def _of_dim(function: Any) -> LargestIndex:
    arguments = schema_of(function).arguments
    position = next(i for i, argument in enumerate(arguments) if argument.name == "dim")

    def largest(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
        given = args[position] if position < len(args) else (kwargs or {}).get("dim", arguments[position].default_value)
        return int(args[0].numel() if given is None or args[0].dim() == 0 else args[0].shape[given]) - 1

    return largest


LARGEST_INDEX: dict[Any, LargestIndex] = {
    # Of windows: an index counts the elements of one channel of the input.
    function: lambda args, kwargs, dims=dims: int(prod(args[0].shape[-dims:])) - 1  # type: ignore[misc]
    for name in _POOLS
    for dims in (2, 3)
    for function in find_overloads(f"aten.{name.format(dims)}.default")
}
LARGEST_INDEX |= {
    function: _of_dim(function) for name in _ALONG_A_DIM.split() for function in find_overloads(f"aten.{name}")
}
"""By operator: the largest index that a call gives. Its indices are its last result."""
