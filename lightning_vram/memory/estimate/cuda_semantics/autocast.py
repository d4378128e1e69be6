"""Autocast of CUDA without CUDA, on the fake device: the same casts, cached for as long."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_vram.memory.estimate.fakes.device_module import KIND
from lightning_vram.memory.estimate.replaced import replaced
from lightning_vram.private_names.cuda.dispatch_keys import (
    AUTOCAST,
    kernels_at,
    operator_named,
    operators_cast_for,
    pass_by,
)
from lightning_vram.private_names.torch.autocast import AVAILABILITY, CAST_ARGUMENTS
from lightning_vram.private_names.torch.operators import given_arguments
from lightning_vram.private_names.torch.tensors import is_view
from lightning_vram.private_names.torch.trees import tree_leaves, tree_map

_OF_A_KIND = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
_norm = torch.ops.aten.norm
_WITH_DTYPE = {_norm.Scalar: _norm.ScalarOpt_dtype, _norm.ScalarOpt_dim: _norm.ScalarOpt_dim_dtype}
_to_dtype = torch.ops.aten.to.dtype


class Cast(StrEnum):
    """What autocast does to the arguments of an operator. The values are names of lists in the header."""

    LOWER = "LOWER_PRECISION_FP"
    FLOAT32 = "FP32"
    FLOAT32_RESULT = "FP32_SET_OPT_DTYPE"  # unless a dtype is asked for
    FLOAT32_NORM = "DIFFERENT_REDISPATCH_SIGNATURE"
    WIDEST = "PROMOTE"
    REFUSED = "refused"


# What autocast_mode.cpp, which no wheel has, adds to the lists.
_BESIDE_THE_LISTS = {"aten::binary_cross_entropy": Cast.REFUSED}
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"  # in every wheel


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let autocast of ``"cuda"`` cast fake tensors, inside the block.

    Casts sit at a dispatch key in front of autograd, as autocast's own, so they are part of the graph. Whether autocast
    is on stays where torch keeps it, so ``torch.utils.checkpoint`` and ``custom_bwd`` save and restore it here, too.
    """

    def as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*("cuda" if arg == KIND else arg for arg in args), **kwargs)

    casts = _Casts()
    forget, construct = torch.clear_autocast_cache, torch.autocast.__init__
    (has_availability, available), (has_cast, cast) = AVAILABILITY, CAST_ARGUMENTS
    is_available, cast_arguments = getattr(has_availability, available), getattr(has_cast, cast)

    def forget_all() -> None:
        forget()
        casts.cached.clear()

    def enter(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        construct(self, "cuda" if device_type == KIND else device_type, *args, **kwargs)

    def cast_to(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast_arguments(value, KIND if device_type == "cuda" else device_type, dtype)

    functions = {name: as_cuda(getattr(torch, name)) for name in _OF_A_KIND}
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, {**functions, "clear_autocast_cache": forget_all}))
        stack.enter_context(replaced(torch.autocast, {"__init__": enter}))
        stack.enter_context(replaced(has_availability, {available: as_cuda(is_available)}))
        stack.enter_context(replaced(has_cast, {cast: cast_to}))
        stack.callback(casts.cached.clear)
        stack.enter_context(kernels_at(AUTOCAST, casts.kernels()))
        yield


class _Casts:
    """Casts as autocast of ``"cuda"`` is set in the running thread."""

    def __init__(self) -> None:
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}  # with the weight, so that its id stays its own

    def kernels(self) -> dict[str, Callable[..., Any]]:
        policies: dict[Cast, Callable[..., Any]] = {
            Cast.LOWER: partial(self._cast_all, lambda _: torch.get_autocast_dtype("cuda")),
            Cast.FLOAT32: partial(self._cast_all, lambda _: torch.float32),
            Cast.FLOAT32_RESULT: _float32_result,
            Cast.FLOAT32_NORM: _float32_result,
            Cast.WIDEST: partial(self._cast_all, _widest),
            Cast.REFUSED: _refuse,
        }
        there = operators_cast_for("cuda")
        return {
            name: partial(_run, policies[cast], operator_named(name))
            for name, cast in autocast_lists().items()
            if name in there
        }

    def _cast_all(self, dtype_for: Callable[[Any], torch.dtype], op: Any, args: Any, kwargs: Any) -> Any:
        dtype = dtype_for((args, kwargs))
        args, kwargs = tree_map(lambda leaf: self._cast(leaf, dtype), (args, kwargs))
        return op(*args, **kwargs)

    def _cast(self, leaf: Any, dtype: torch.dtype) -> Any:
        if not _is_eligible(leaf) or leaf.dtype is dtype:
            return leaf
        if not _is_cacheable(leaf, dtype):
            return _to_dtype(leaf, dtype)
        if id(leaf) not in self.cached:
            with torch.enable_grad():  # it serves later forwards, too
                self.cached[id(leaf)] = leaf, _to_dtype(leaf, dtype)
        return self.cached[id(leaf)][1]


def _run(policy: Callable[..., Any], op: Any, /, *args: Any, **kwargs: Any) -> Any:
    with pass_by(AUTOCAST):
        is_on = torch.is_autocast_enabled("cuda") and any(map(_is_eligible, tree_leaves((args, kwargs))))
        return policy(op, args, kwargs) if is_on else op(*args, **kwargs)


def _is_eligible(leaf: Any) -> bool:
    is_ours = isinstance(leaf, Tensor) and leaf.device.type == KIND
    return is_ours and leaf.is_floating_point() and leaf.dtype is not torch.float64


def _is_cacheable(tensor: Tensor, dtype: torch.dtype) -> bool:
    is_weight = tensor.requires_grad and tensor.is_leaf and not is_view(tensor) and tensor.dtype is torch.float32
    is_to_cache = dtype is torch.get_autocast_dtype("cuda") and torch.is_autocast_cache_enabled()
    return is_weight and is_to_cache and not torch.is_inference_mode_enabled()


def _float32_result(op: Any, args: Any, kwargs: Any) -> Any:
    """Let the kernel cast: no float32 copy of the input is made. Norms do it by another signature."""
    if not _is_eligible(args[0]):
        return op(*args, **kwargs)
    given = given_arguments(op, args, kwargs)
    if given.get("dtype") is None:
        given["dtype"] = torch.float32
    return _WITH_DTYPE.get(op, op)(**given)


def _widest(nest: Any) -> torch.dtype:
    has_float32 = any(leaf.dtype is torch.float32 for leaf in tree_leaves(nest) if _is_eligible(leaf))
    return torch.float32 if has_float32 else torch.get_autocast_dtype("cuda")


def _refuse(op: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(f"{op} is unsafe to autocast; CUDA refuses it. Use binary_cross_entropy_with_logits.")


@cache
def autocast_lists(header: Path = _HEADER) -> dict[str, Cast]:
    """Read how CUDA's autocast casts each operator, by its full name, from a header of torch."""
    try:
        lists = {cast: _names(header.read_text(), cast) for cast in Cast if cast is not Cast.REFUSED}
    except OSError:
        lists = {}
    if not lists or not all(lists.values()):
        raise RuntimeError(
            f"the rules of autocast on CUDA cannot be read from {header.name} of torch {torch.__version__}; "
            "install torch with its headers, or estimate without autocast."
        )
    return {name: cast for cast, names in lists.items() for name in names} | _BESIDE_THE_LISTS


def _names(text: str, cast: Cast) -> list[str]:
    """Names in ``#define AT_FORALL_CAST(_) _(name) _(name, overload) _(..., "name.overload", ...)``."""
    match = re.search(rf"#define AT_FORALL_{cast}\(_\)((?:.*\\\n)*.*)", text)
    if match is None:
        return []
    if cast is Cast.FLOAT32_NORM:
        return [f"aten::{name}" for name in re.findall(r'"([\w.]+)"', match[1])]
    entries = re.findall(r"\b_\((\w+)(?:,\s*(\w+))?\)", match[1])
    return [f"aten::{name}.{overload}" if overload else f"aten::{name}" for name, overload in entries]
