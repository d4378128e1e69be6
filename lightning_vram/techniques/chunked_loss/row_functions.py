"""Functions that treat each token alone: of single logits, along the classes, and reductions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_vram.techniques.chunked_loss.expression import Call, Rows, Whole, read_autocast
from lightning_vram.techniques.chunked_loss.lazy_logits import LazyLogits
from lightning_vram.techniques.chunked_loss.shapes import Function

_ARITHMETIC = ("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where", "masked_fill", "lerp")
_OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")
_OTHERS = ("__rdiv__", "__div__", "__pow__", "__rpow__", "__neg__", "__abs__", "rsub", "subtract", "multiply", "divide")
_OF_ONE = ("tanh", "exp", "log", "log1p", "expm1", "neg", "abs", "sqrt", "square", "sigmoid", "logsigmoid", "softplus")
_LIMITS = ("clamp", "clamp_min", "clamp_max", "clip", "nan_to_num", "relu", "special_entr", "xlogy", "special_xlogy")
_KINDS = ("float", "double", "half", "bfloat16", "to", "type", "type_as", "clone")
_COMPARISONS = (
    "eq",
    "ne",
    "gt",
    "lt",
    "ge",
    "le",
    "isnan",
    "isinf",
    "isfinite",
    "__eq__",
    "__ne__",
    "__gt__",
    "__lt__",
)
_LAST_ONES = ("__ge__", "__le__", "logaddexp")


def of_single(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Note a function of single logits, with scalars, values for each token, or other logits."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    ours = [one for one in named.values() if isinstance(one, LazyLogits)]
    first = ours[0]
    if any(one.lead != first.lead or one.class_dim != first.class_dim for one in ours):
        return NotImplemented
    nodes: dict[Any, Any] = {}
    samples: dict[Any, Any] = {}
    for name, value in named.items():
        nodes[name], samples[name] = value, value
        if isinstance(value, LazyLogits):
            nodes[name], samples[name] = value.node, value.sample
        elif isinstance(value, Tensor):
            node = as_node(value, first)
            if node is None:
                return NotImplemented
            nodes[name], samples[name] = node, node.values
            if isinstance(node, Rows):
                samples[name] = value.new_empty(0, value.shape[-1])
    with torch.no_grad():
        sample = func(*(samples[i] for i in range(len(args))), **{name: samples[name] for name in kwargs})
    is_same = isinstance(sample, Tensor) and sample.shape == first.sample.shape and sample.device == first.sample.device
    if not is_same:
        return NotImplemented
    call = Call(
        func, [nodes[i] for i in range(len(args))], {n: nodes[n] for n in kwargs}, read_autocast(first.device.type)
    )
    return first.like(call, sample, first.lead, class_dim=first.class_dim, is_view=func.__name__ in ("to", "float"))


def as_node(value: Tensor, logits: LazyLogits) -> Rows | Whole | None:
    """Return a tensor beside logits as a node: values for each token, or for all; ``None`` where it is neither."""
    lead = logits.lead
    if not value.dim():
        return Whole(value)
    if value.numel() == value.shape[-1] and value.dim() <= logits.ndim and logits.class_dim == logits.ndim - 1:
        value = value.flatten()  # [1, V]: not a copy for each token
    if logits.class_dim != logits.ndim - 1 or value.dim() > logits.ndim:
        return None
    if value.dim() == 1:
        return Whole(value) if value.shape[0] in (1, logits.shape[-1]) else None
    shape = torch.broadcast_shapes(value.shape[:-1], lead)  # type: ignore[no-untyped-call]
    if shape != lead or value.shape[-1] not in (1, logits.shape[-1]):
        return None
    return Rows(value.expand(*lead, value.shape[-1]))


def along_classes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Note ``softmax`` or ``log_softmax`` along the classes."""
    logits, dim = args[0] if args else kwargs.get("input"), _dim_of(args, kwargs)
    dtype = kwargs.get("dtype", next((one for one in args[2:] if isinstance(one, torch.dtype)), None))
    if not isinstance(logits, LazyLogits) or not isinstance(dim, int) or dim % logits.ndim != logits.class_dim:
        return NotImplemented
    function = torch.log_softmax if func.__name__ == "log_softmax" else torch.softmax
    call = Call(function, (logits.node, -1), {"dtype": dtype}, read_autocast(logits.device.type))
    with torch.no_grad():
        sample = function(logits.sample, -1, dtype=dtype)
    return logits.like(call, sample, logits.lead, class_dim=logits.class_dim, is_view=False)


def reduce(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute what is left of each token's logits: a sum, a largest one, an entropy's last step."""
    logits, name = args[0] if args else kwargs.get("input"), func.__name__
    if not isinstance(logits, LazyLogits):
        return NotImplemented
    dim, options = _dim_of(args, kwargs), {"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}
    if name in ("sum", "mean") and dim is None and not args[1:] and kwargs.keys() <= {"dtype"}:
        total = logits.reduce_to_sum(torch.sum, -1, **options)
        return total / logits.numel() if name == "mean" else total
    if isinstance(dim, Sequence) and len(dim) == 1:
        (dim,) = dim
    if not isinstance(dim, int) or dim % logits.ndim != logits.class_dim:
        return NotImplemented
    keepdim = bool(kwargs.get("keepdim", args[2] if len(args) > 2 and isinstance(args[2], bool) else False))
    if len(args) > 3:
        return NotImplemented
    found = logits.reduce(getattr(torch, name), -1, keepdim=True, **options)
    shaped = [_place(one, logits, keepdim=keepdim) for one in found]
    return shaped[0] if len(shaped) == 1 else getattr(torch.return_types, name)(shaped)


def top_k(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute the largest logits of each token."""
    logits, *rest = args
    names = ("k", "dim", "largest", "sorted")
    options = {**dict(zip(names, rest, strict=False)), **kwargs}
    dim = options.pop("dim", -1)
    if (
        not isinstance(logits, LazyLogits)
        or dim % logits.ndim != logits.class_dim
        or logits.class_dim != logits.ndim - 1
    ):
        return NotImplemented
    found: Any = [one.view(*logits.lead, one.shape[-1]) for one in logits.reduce(torch.topk, **options)]
    return torch.return_types.topk(found)


def gather(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute logits of chosen classes of each token."""
    named = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
    if func.__name__ == "take_along_dim":
        named = {**dict(zip(("input", "indices", "dim"), args, strict=False)), **kwargs}
        named["index"] = named.pop("indices", None)
    logits, index, dim = named.get("input"), named.get("index"), named.get("dim")
    if not isinstance(logits, LazyLogits) or not isinstance(index, Tensor) or not isinstance(dim, int):
        return NotImplemented
    at = logits.class_dim
    if dim % logits.ndim != at or at != logits.ndim - 1 or index.shape[:-1] != logits.lead:
        return NotImplemented
    (found,) = logits.reduce(torch.gather, -1, Rows(index))
    return found.view(index.shape)


def _dim_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))


def _place(found: Tensor, logits: LazyLogits, *, keepdim: bool) -> Tensor:
    """Give results [N, 1] the shape of the tokens."""
    whole = found.view(logits.lead)
    return whole.unsqueeze(logits.class_dim) if keepdim else whole


ROW_FUNCTIONS: dict[str, Function] = {
    **dict.fromkeys(
        (*_ARITHMETIC, *_OPERATORS, *_OTHERS, *_OF_ONE, *_LIMITS, *_KINDS, *_COMPARISONS, *_LAST_ONES), of_single
    ),
    **dict.fromkeys(("softmax", "log_softmax"), along_classes),
    **dict.fromkeys(
        ("sum", "mean", "logsumexp", "amax", "amin", "argmax", "argmin", "max", "min", "all", "any"), reduce
    ),
    "topk": top_k,
    **dict.fromkeys(("gather", "take_along_dim"), gather),
}
