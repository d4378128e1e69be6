"""Operators that must not read a saved argument or result with an error, because their backward magnifies it."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_vram.private_names.torch.operator_names import (
    COPY_TO,
    DIVIDE_EACH,
    EXACT_ARGUMENTS,
    EXACT_RESULTS,
    LINEAR_ALGEBRA,
    NORM_OF_EACH,
)
from lightning_vram.private_names.torch.operators import overload_name, schema_of

# All tensors they get.
_ALL_NAMES = (
    "abs acos acosh addcdiv amax amin aminmax asin atan2 atanh binary_cross_entropy cholesky cholesky_inverse "
    "cholesky_solve copysign cosh cumprod digamma dist erfinv fmax fmin fmod huber_loss hypot igamma igammac "
    "index_reduce inverse lgamma log log10 log1p log2 logaddexp logaddexp2 logcumsumexp logit logsumexp lu_solve "
    "lu_unpack maximum minimum mse_loss mvlgamma nansum polygamma prod remainder renorm scatter_reduce "
    "segment_reduce sgn sinh smooth_l1_loss tan triangular_solve xlogy"
)
_ALL = frozenset([*_ALL_NAMES.split(), *EXACT_ARGUMENTS.split()])
_PREFIXES = ("linalg_", LINEAR_ALGEBRA, "special_")
# One of them. Its other arguments are only multiplied with.
_ONE = {"div": "other", DIVIDE_EACH: "other", "grid_sampler_2d": "grid", "grid_sampler_3d": "grid"}
_ONLY_WHOLE = frozenset(["max", "min", "median", "nanmedian"])  # with a ``dim`` the backward has indices
_NORMS = frozenset(["norm", "linalg_vector_norm", NORM_OF_EACH])

# Of what is saved of these: their first result. (Second results are always exact.)
_RESULTS_NAMES = (
    "aminmax amax amin cholesky cholesky_inverse cholesky_solve cumprod dist erfinv hypot index_reduce inverse "
    "logaddexp logcumsumexp logsumexp max mean median min nanmedian norm pow prod reciprocal renorm rsqrt "
    "scatter_reduce segment_reduce sqrt std sum tan var"
)
_RESULTS = frozenset([*_RESULTS_NAMES.split(), *EXACT_RESULTS.split()])
_SMOOTH_NORM = 2


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
    if name in _NORMS:
        return lambda args, kwargs: iter(()) if _is_smooth_norm(args, kwargs) else iterate_tensors(args)
    if name == "pow":
        return lambda args, kwargs: iter(()) if _is_polynomial(args) else iterate_tensors(args)
    if name in _ONE:
        position = [argument.name for argument in schema_of(function).arguments].index(_ONE[name])
        return lambda args, kwargs: iterate_tensors(args[position : position + 1])
    is_whole = name in _ONLY_WHOLE and overload_name(function) == "default"
    if name in _ALL or is_whole or name.startswith(_PREFIXES):
        return lambda args, kwargs: iterate_tensors((*args, *(kwargs or {}).values()))
    return None


@cache
def gives_exact_result(function: Any) -> bool:
    """Whether the first result of ``function`` must be kept exactly, wherever it is saved."""
    name = base_name(function)
    if function.namespace != "aten" or (name in _ONLY_WHOLE and overload_name(function) != "default"):
        return False
    return name in _RESULTS or name.startswith(("linalg_", LINEAR_ALGEBRA))


def iterate_tensors(args: Any) -> Iterator[Tensor]:
    """Yield the tensors among ``args`` and in lists of them."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from iterate_tensors(arg)


def _is_smooth_norm(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    order = args[1] if len(args) > 1 else (kwargs or {}).get("ord", _SMOOTH_NORM)
    return order is None or order == _SMOOTH_NORM


def _is_polynomial(args: tuple[Any, ...]) -> bool:
    base, exponent = args[:2]
    is_number = isinstance(exponent, int | float) and isinstance(base, Tensor)
    return is_number and exponent >= 1 and float(exponent).is_integer()


def is_constant(function: Any) -> bool:
    """Whether ``function`` makes a tensor from nothing: no random numbers, and no uninitialised memory."""
    return function.namespace == "aten" and base_name(function) in ("eye", "ones", "full", "linspace", "scalar_tensor")


def is_pointwise(function: Any) -> bool:
    """Whether each element of the result comes from one of each argument, or is one of them."""
    others = (COPY_TO, "clone", "cat", "stack", "leaky_relu")  # of the last torch 2.11 does not say so
    return torch.Tag.pointwise in function.tags or base_name(function) in others
