"""What an operator costs to run again."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.operators.alike_parts import num_alike
from lightning_vram.private_names.torch.operator_names import (
    ACTIVATED_PRODUCT,
    ATTENTIONS,
    CONVOLUTIONS,
    MKL_PRODUCTS,
    MKLDNN_CONVOLUTIONS,
    MKLDNN_PRODUCTS,
    OTHER_PRODUCTS,
    PRODUCTS,
    RECURRENT,
    SPARSE_PRODUCTS,
    VIEWS,
)
from lightning_vram.private_names.torch.operators import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    all_operator_names,
    schema_of,
)
from lightning_vram.private_names.torch.trees import tensors_in

BALANCE = 160.0
"""FLOPs a GPU does in the time it moves one byte.

Peak dense bf16 with fp32 accumulation over peak bandwidth, from the makers' sheets: A100 80GB 312e12 / 2.0e12 = 153,
RTX 4090 165e12 / 1.0e12 = 164, H200 989e12 / 4.8e12 = 206, B200 2250e12 / 8e12 = 281, H100 SXM 989e12 / 3.35e12 = 295.
Real matrix products reach a smaller part of their peak (about 0.6) than elementwise kernels of theirs (about 0.85),
which takes the newer ones down to 145 to 210. fp32 without TF32 lies far below; there cheap operators are overrated,
the order of the costly ones stays.
"""


def _names(namespace: str, *names: str) -> frozenset[str]:
    return frozenset(f"{namespace}::{name}" for name in " ".join(names).split())


_FLAT_PRODUCTS = (  # two FLOPs per element of the result and per number in the last dimension of the left matrix
    _names("aten", "mm bmm addmm baddbmm mv dot vdot linear mkldnn_linear addmv", PRODUCTS)
    | _names("mkldnn", MKLDNN_PRODUCTS)
    | _names("mkl", MKL_PRODUCTS)
)
_SPARSE_PRODUCTS = _names("aten", "sparse_sampled_addmm", SPARSE_PRODUCTS)
_CONVOLUTIONS = (
    _names("aten", "convolution convolution_overrideable mkldnn_convolution cudnn_convolution")
    | _names("aten", "cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu conv_tbc")
    | _names("aten", "miopen_convolution miopen_convolution_transpose miopen_depthwise_convolution")
    | _names("aten", "miopen_convolution_relu miopen_convolution_add_relu")
    | _names("aten", "conv_depthwise3d slow_conv3d_forward thnn_conv2d")
    | _names("aten", "slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d")
    | _names("aten", CONVOLUTIONS)
    | _names("mkldnn", MKLDNN_CONVOLUTIONS)
)
_RECURRENT = _names("aten", "miopen_rnn mkldnn_rnn_layer", RECURRENT)
MATMULS = _FLAT_PRODUCTS | _SPARSE_PRODUCTS | _CONVOLUTIONS | _RECURRENT | _names("aten", "addbmm", OTHER_PRODUCTS)
"""Qualified names, without overload, of matrix products, convolutions and recurrent kernels."""

ATTENTION = _names("aten", ATTENTIONS) | _names("higher_order", "flex_attention")
"""Qualified names, without overload, of attention kernels in the forward."""

_FREE = _names(  # they give memory or numbers about tensors, and touch none
    "aten", "empty empty_like empty_strided new_empty new_empty_strided lift_fresh", VIEWS
)
# They read of a large table what they give. Counted by its size, a look-up would cost more than a layer.
_LOOKUPS = _names("aten", "embedding index index_select gather take slice_copy select_copy")
_LEFT_MATRIX_SECOND = _names("aten", "addmm baddbmm addmv", ACTIVATED_PRODUCT)
_SHOWN_NAMES = 5


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
    """Estimate what one call of an operator does; fake and meta tensors do, and no number is read.

    :data:`NO_WORK` for views, for uninitialised memory, and for operators that give no tensor and write to none.
    """
    name = _qualified_name(func)
    results = list(tensors_in(outputs))
    if name in _FREE or _is_view(func):
        return NO_WORK
    if not results and isinstance(func, OpOverload) and not schema_of(func).is_mutable:
        return NO_WORK
    given = list(tensors_in((args, kwargs)))
    written_bytes = sum(map(_touched_bytes, results))
    read_bytes = sum(
        min(_touched_bytes(tensor), written_bytes) if name in _LOOKUPS else _touched_bytes(tensor) for tensor in given
    )
    num_calls = num_alike()
    flops = _count_flops(func, args, kwargs, outputs)
    return OperatorWork(flops * num_calls, (read_bytes + written_bytes) * num_calls, num_calls)


def resolve_operators(names: Sequence[str]) -> frozenset[Any]:
    """Find operators, as a dispatch mode sees them, by the names they have under ``torch.ops``.

    Such as ``"aten.mm"`` (all its overloads), ``"aten.mm.default"``, ``"torch.ops.mylib.flash"`` or
    ``"higher_order.flex_attention"``. A profiler's ``"aten::mm"`` is understood, too. ``ValueError`` names close ones.

    Example:
        >>> sorted(str(operator) for operator in resolve_operators(["aten.dot"]))
        ['aten.dot.default', 'aten.dot.out']
    """
    if isinstance(names, str):
        raise TypeError(f"operators must be a list of names, got the string {names!r}. Write [{names!r}].")
    return frozenset(operator for name in names for operator in _resolve(name))


def _resolve(name: object) -> list[Any]:
    if not isinstance(name, str):
        raise TypeError(f"operators must be names such as 'aten.mm', got {name!r} of type {type(name).__name__}.")
    namespace, *rest = name.replace("::", ".").removeprefix("torch.ops.").split(".")
    found: Any = None
    # Two or three parts and none private to Python: anything else would be an attribute of torch.ops, no operator.
    if len(rest) in (1, 2) and all(rest) and namespace.isidentifier() and not rest[0].startswith("__"):
        found = getattr(torch.ops, namespace)
        for part in rest:
            found = getattr(found, part, None)
    if isinstance(found, OpOverloadPacket):
        return [getattr(found, overload) for overload in _overloads(found)]
    if isinstance(found, OpOverload | HigherOrderOperator):
        return [found]
    raise ValueError(f"operators={name!r} is not an operator of torch.ops. {_suggest(name)}")


def _suggest(name: str) -> str:
    known = sorted({known.partition(".")[0].replace("::", ".") for known in all_operator_names()})
    plain = name.replace("::", ".").removeprefix("torch.ops.")
    parts = plain.split(".")
    wanted = ".".join(parts[:2]) if len(parts) > 1 else f"aten.{plain}"
    if wanted in known and len(parts) > 1:
        overloads = ", ".join(map(repr, _overloads(getattr(getattr(torch.ops, parts[0]), parts[1]))))
        return f"{wanted} has the overloads {overloads}; write {wanted!r} for all of them."
    close = difflib.get_close_matches(wanted, known, n=_SHOWN_NAMES, cutoff=0.7)
    hint = f"Close names: {', '.join(map(repr, close))}. " if close else ""
    return f"{hint}Write 'namespace.name' as under torch.ops, and import the library that defines it first."


def _overloads(packet: Any) -> list[str]:
    names: list[str] = packet.overloads()
    return names


@cache
def _qualified_name(func: Any) -> str:
    """``"aten::mm"``, without the overload."""
    if isinstance(func, OpOverload):
        return str(schema_of(func).name)
    if isinstance(func, HigherOrderOperator):
        name: Any = func.name
        return f"higher_order::{name()}"
    return ""


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


@cache
def _flop_formulas() -> Mapping[Any, Any]:
    try:
        from torch.utils.flop_counter import flop_registry
    except ImportError:  # not a documented name; without it the formulas below and the bytes remain
        return {}
    formulas: Mapping[Any, Any] = flop_registry
    return formulas


def _count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    packet = getattr(func, "overloadpacket", func)
    formula = _flop_formulas().get(packet)
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
    if name == "aten::addbmm":  # the batch is summed
        return int(2 * args[1].numel() * args[2].shape[-1])
    if name in _CONVOLUTIONS:  # weight [C_out, C_in / groups, *kernel]
        return int(2 * result.numel() * prod(args[1].shape[1:]))
    return 0
