"""What can be computed from logits that are not in memory, by the names of torch's functions."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.techniques.chunked_loss.lazy_logits import LazyLogits
from lightning_vram.techniques.chunked_loss.row_program import (
    Call,
    Rows,
    Whole,
    compute_sum,
    detach,
    map_rows,
    read_autocast,
)

Function = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Gets a function of torch and its arguments; returns what that returns, or ``NotImplemented``."""


def change_shape(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``view``, ``reshape``, ``flatten``, ``unsqueeze``: other tokens' dimensions, the same classes."""
    logits = _logits_of(args)
    if logits is None or any(isinstance(one, torch.dtype) for one in (*args, *kwargs.values())):
        return NotImplemented
    if func.__name__ == "view_as" and args[-1] is logits and len(args) > 1:
        return NotImplemented  # asked by autograd, for hooks of modules' gradients, which need a tensor
    shape = func(torch.empty(logits.shape, device="meta"), *_on_meta(args[1:]), **kwargs).shape
    if logits.class_dim != logits.ndim - 1 or len(shape) < 2 or shape[-1] != logits.shape[-1]:
        return NotImplemented
    lead = shape[:-1]
    return logits.like(
        map_rows(logits.node, lambda rows: rows.reshape(*lead, rows.shape[-1])), logits.sample, lead, is_view=True
    )


def _on_meta(values: Sequence[Any]) -> list[Any]:
    return [
        torch.empty(one.shape, dtype=one.dtype, device="meta") if isinstance(one, Tensor) else one for one in values
    ]


def turn(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``transpose``, ``permute``, ``movedim``: where each dimension goes is seen on sizes that all differ."""
    logits = _logits_of(args)
    if logits is None:
        return NotImplemented
    sizes = func(torch.empty(tuple(range(2, 2 + logits.ndim)), device="meta"), *args[1:], **kwargs).shape
    order = [size - 2 for size in sizes]
    class_dim = order.index(logits.class_dim)
    if class_dim not in (1, logits.ndim - 1):
        return NotImplemented
    lead = [dim if dim < logits.class_dim else dim - 1 for dim in order if dim != logits.class_dim]
    node = map_rows(logits.node, lambda rows: rows.permute(*lead, rows.ndim - 1))
    shape = [logits.lead[dim] for dim in lead]
    return logits.like(node, logits.sample, shape, class_dim=class_dim, is_view=True)


def cut_tokens(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``split``, ``chunk``, ``unbind``, ``select``, ``narrow``, ``index_select`` along tokens."""
    logits = _logits_of(args)
    place = 2 if func.__name__ in ("split", "chunk") else 1
    dim = kwargs.get("dim", args[place] if len(args) > place else 0)
    if logits is None or not isinstance(dim, int) or logits.class_dim != logits.ndim - 1:
        return NotImplemented
    if dim % logits.ndim == logits.class_dim:
        return NotImplemented

    def cut(rows: Tensor, which: int | None) -> Any:
        found: Any = func(rows, *args[1:], **kwargs)
        return found if which is None else found[which]

    shapes = func(torch.empty(*logits.lead, 1, device="meta"), *_on_meta(args[1:]), **kwargs)
    if isinstance(shapes, Tensor):
        return _with_rows(logits, lambda rows: cut(rows, None), shapes.shape)
    return tuple(
        _with_rows(logits, lambda rows, which=which: cut(rows, which), one.shape) for which, one in enumerate(shapes)
    )


def take_items(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``logits[...]``: some tokens, some neighbouring classes, or a class of each token."""
    logits = _logits_of(args)
    if logits is None or logits.class_dim != logits.ndim - 1:
        return NotImplemented
    index = _complete(args[1], logits.ndim)
    if index is None:
        return NotImplemented
    *tokens, classes = index
    if all(isinstance(one, Tensor) and one.dtype == torch.int64 for one in index):
        shape = torch.broadcast_shapes(*(one.shape for one in index))  # type: ignore[no-untyped-call]
        chosen = map_rows(logits.node, lambda rows: rows[tuple(tokens)].expand(*shape, rows.shape[-1]))
        column = classes.expand(shape).unsqueeze(-1)
        some = logits.like(chosen, logits.sample, shape, is_view=False)
        (found,) = some.reduce(torch.gather, -1, Rows(column))
        return found.view(shape)
    if not isinstance(classes, slice) or any(one is None for one in tokens):
        return NotImplemented
    some = logits
    if any(one != slice(None) if isinstance(one, slice) else True for one in tokens):
        has_mask = any(isinstance(one, Tensor) and one.dtype == torch.bool for one in tokens)
        on_meta = torch.empty(*logits.lead, 1, device="meta")
        shape = None if has_mask else on_meta[tuple(_on_meta(tokens))].shape
        some = _with_rows(logits, lambda rows: rows[tuple(tokens)], shape)
    if some is NotImplemented or classes == slice(None):
        return some
    node, sample = Call(lambda rows: rows[:, classes], (some.node,)), some.sample[:, classes]
    return some.like(node, sample, some.lead, is_view=True)


def keep(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``contiguous``: the same logits."""
    logits = _logits_of(args)
    return NotImplemented if logits is None or len(args) > 1 or kwargs else logits


def cut_off(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``detach``."""
    logits = _logits_of(args)
    if logits is None:
        return NotImplemented
    node, class_dim = detach(logits.node), logits.class_dim
    with torch.no_grad():
        return logits.like(node, logits.sample, logits.lead, class_dim=class_dim, is_view=True)


def _logits_of(args: Sequence[Any]) -> LazyLogits | None:
    return args[0] if args and isinstance(args[0], LazyLogits) else None


def _with_rows(logits: LazyLogits, cut: Callable[..., Tensor], shape: torch.Size | None) -> Any:
    node = map_rows(logits.node, cut)
    if shape is None:  # as many as a mask has
        shape = cut(torch.empty(*logits.lead, 1, device=logits.device)).shape
    return NotImplemented if len(shape) < 2 else logits.like(node, logits.sample, shape[:-1], is_view=True)


def _complete(index: Any, ndim: int) -> list[Any] | None:
    """Return an index with an entry for each dimension, or ``None`` where it is of another kind."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(
        one.ndim if isinstance(one, Tensor) and one.dtype == torch.bool else 1 for one in parts if one is not ...
    )
    used -= sum(one is None for one in parts)
    if any(isinstance(one, bool | list) for one in parts) or sum(one is ... for one in parts) > 1 or used > ndim:
        return None
    fill = [slice(None)] * (ndim - used)
    place = next((place for place, one in enumerate(parts) if one is ...), len(parts))
    parts[place : place + 1] = fill
    return parts if not isinstance(parts[-1], Tensor) or parts[-1].dtype == torch.int64 else None


SHAPES: dict[str, Function] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "unsqueeze", "view_as", "reshape_as"), change_shape),
    **dict.fromkeys(("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "mT"), turn),
    **dict.fromkeys(("split", "chunk", "unbind", "select", "narrow", "index_select"), cut_tokens),
    "__getitem__": take_items,
    "contiguous": keep,
    "detach": cut_off,
}


_ARITHMETIC = ("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where", "masked_fill", "lerp")
_OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")
_OTHERS = ("__rdiv__", "__div__", "__pow__", "__rpow__", "__neg__", "__abs__", "rsub", "subtract", "multiply", "divide")
_OF_ONE = ("tanh", "exp", "log", "log1p", "expm1", "neg", "abs", "sqrt", "square", "sigmoid", "logsigmoid", "softplus")
_LIMITS = ("clamp", "clamp_min", "clamp_max", "clip", "nan_to_num", "relu", "special_entr", "xlogy", "special_xlogy")
_KINDS = ("float", "double", "half", "bfloat16", "to", "type", "type_as", "clone")
_COMPARISONS = ("eq", "ne", "gt", "lt", "ge", "le", "__eq__", "__ne__", "__gt__", "__lt__", "__ge__", "__le__")
_LAST_ONES = ("isnan", "isinf", "isfinite", "logaddexp")


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
    node_args, node_kwargs = [nodes[i] for i in range(len(args))], {name: nodes[name] for name in kwargs}
    call = Call(func, node_args, node_kwargs, read_autocast(first.device.type))
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
    options = {**dict(zip(("k", "dim", "largest", "sorted"), rest, strict=False)), **kwargs}
    dim = options.pop("dim", -1)
    if not isinstance(logits, LazyLogits) or not dim % logits.ndim == logits.class_dim == logits.ndim - 1:
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


_SINGLE = (*_ARITHMETIC, *_OPERATORS, *_OTHERS, *_OF_ONE, *_LIMITS, *_KINDS, *_COMPARISONS, *_LAST_ONES)
_REDUCING = ("sum", "mean", "logsumexp", "amax", "amin", "argmax", "argmin", "max", "min", "all", "any")
ROW_FUNCTIONS: dict[str, Function] = {
    **dict.fromkeys(_SINGLE, of_single),
    **dict.fromkeys(("softmax", "log_softmax"), along_classes),
    **dict.fromkeys(_REDUCING, reduce),
    "topk": top_k,
    **dict.fromkeys(("gather", "take_along_dim"), gather),
}


_WORTH_DROPPING = 8  # one of so many tokens: to leave them out copies the hidden states of the others
_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_KL_DIV = ("input", "target", "size_average", "reduce", "reduction", "log_target")


def classify(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``cross_entropy`` and ``nll_loss``."""
    named = {**dict(zip(_CROSS_ENTROPY, args, strict=False)), **kwargs}
    logits, target, weight = named["input"], named["target"], named.get("weight")
    if not isinstance(logits, LazyLogits) or _is_old(named) or logits.class_dim != 1 or not isinstance(target, Tensor):
        return NotImplemented
    options: dict[str, Any] = {"weight": None if weight is None else Whole(weight)}
    if func.__name__ == "cross_entropy":
        options["label_smoothing"] = named.get("label_smoothing", 0.0)
    function: Any = getattr(F, func.__name__)
    if isinstance(target, LazyLogits) or target.is_floating_point():
        if function is F.nll_loss or target.shape != logits.shape:
            return NotImplemented
        found = _against_probabilities(logits, target, named.get("reduction", "mean"), options)
    elif target.shape != logits.lead:
        return NotImplemented  # torch says what is wrong
    else:
        ignore_index = named.get("ignore_index", -100)
        options["ignore_index"] = ignore_index
        counted = target.flatten() != ignore_index
        of_tokens = partial(_of_class, function)
        found = _against_classes(logits, (target, counted), of_tokens, named.get("reduction", "mean"), options)
    return found.to(_dtype_of(function, logits))


def _against_classes(
    logits: LazyLogits, target: tuple[Tensor, Tensor], of_tokens: Any, reduction: str, options: Mapping[str, Any]
) -> Tensor:
    """Return the loss of a class for each token, of those that are counted."""
    classes, counted = target[0].flatten(), target[1]
    chosen = None if isinstance(classes, FakeTensor) else _choose(counted)
    rows, column = logits, classes.unsqueeze(-1)
    if chosen is not None:
        node = map_rows(logits.node, lambda one: one.reshape(-1, one.shape[-1]).index_select(0, chosen))
        rows, column = logits.like(node, logits.sample, chosen.shape, is_view=True), column.index_select(0, chosen)
    if reduction == "none":
        (losses,) = rows.reduce(of_tokens, Rows(column), **options)
        if chosen is not None:
            losses = losses.new_zeros(counted.shape).index_copy(0, chosen, losses)
        return losses.view(logits.lead)
    total = rows.reduce_to_sum(of_tokens, Rows(column), **options)
    if reduction == "sum":
        return total
    count = counted.sum()
    if options["weight"] is not None:
        count = (options["weight"].values.detach()[classes.masked_fill(~counted, 0)] * counted).sum()
    # Of no token the loss is NaN, but its gradient is zero: it goes past the weights.
    return torch.where(count != 0, total / count.masked_fill(count == 0, 1), math.nan)


def _of_class(function: Any, logits: Tensor, column: Tensor, **options: Any) -> Tensor:
    loss: Tensor = function(_upcast(logits), column.squeeze(-1), reduction="none", **_in_dtype(options, logits))
    return loss


def _against_probabilities(logits: LazyLogits, target: Tensor, reduction: str, options: Mapping[str, Any]) -> Tensor:
    """Return the loss of probabilities of all classes for each token."""
    other: Any = target.node if isinstance(target, LazyLogits) else Rows(target.movedim(1, -1))
    if reduction == "none":
        (losses,) = logits.reduce(_of_probabilities, other, **options)
        return losses.view(logits.lead)
    total = logits.reduce_to_sum(_of_probabilities, other, **options)
    return total / logits.lead.numel() if reduction == "mean" else total


def _of_probabilities(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    wide = _upcast(logits)
    return F.cross_entropy(wide, target.to(wide.dtype), reduction="none", **_in_dtype(options, logits))


def diverge(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``kl_div`` of two heads' log-probabilities, or of one beside a tensor."""
    named = {**dict(zip(_KL_DIV, args, strict=False)), **kwargs}
    one, other, reduction = named["input"], named["target"], named.get("reduction", "mean")
    ours = one if isinstance(one, LazyLogits) else other
    if _is_old(named) or reduction == "none" or one.shape != other.shape or ours.class_dim != ours.ndim - 1:
        return NotImplemented
    if any(isinstance(value, LazyLogits) and value.lead != ours.lead for value in (one, other)):
        return NotImplemented
    nodes = [value.node if isinstance(value, LazyLogits) else Rows(value) for value in (one, other)]
    root = Call(_diverge, nodes, {"log_target": named.get("log_target", False)}, read_autocast(ours.device.type))
    total = compute_sum(root, ours.chunk_rows)
    size = {"batchmean": one.shape[0], "mean": one.numel()}.get(reduction, 1)
    return total / size if size != 1 else total


def _diverge(logits: Tensor, target: Tensor, *, log_target: bool) -> Tensor:
    return F.kl_div(logits, target, reduction="none", log_target=log_target).sum(-1)


def _is_old(named: Mapping[str, Any]) -> bool:
    """Whether a reduction is asked for as it was before ``reduction=``."""
    return named.get("size_average") is not None or named.get("reduce") is not None


def _dtype_of(function: Any, logits: LazyLogits) -> torch.dtype:
    """Return that of the loss: under autocast it may be another than the logits'."""
    with torch.no_grad():
        no_classes = torch.empty(0, dtype=torch.int64, device=logits.device)
        dtype: torch.dtype = function(logits.sample, no_classes, reduction="sum").dtype
    return dtype


def _upcast(logits: Tensor) -> Tensor:
    """What each token adds to a loss is rounded once, in the sum."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _in_dtype(options: Mapping[str, Any], logits: Tensor) -> dict[str, Any]:
    weight = options.get("weight")
    return {**options, "weight": None if weight is None else weight.to(_upcast(logits).dtype)}


def _choose(counted: Tensor) -> Tensor | None:
    """Return the places of the tokens that count, or ``None`` where it is not worth it to leave the others out."""
    places = counted.nonzero().squeeze(-1)
    return places if (len(counted) - len(places)) * _WORTH_DROPPING > len(counted) else None


LOSSES: dict[str, Function] = {"cross_entropy": classify, "nll_loss": classify, "kl_div": diverge}


FUNCTIONS: dict[str, Function] = {**SHAPES, **ROW_FUNCTIONS, **LOSSES}
