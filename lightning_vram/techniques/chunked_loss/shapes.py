"""Other shapes of logits that are not computed yet: cut and reshaped along tokens, moved, transposed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_vram.techniques.chunked_loss.expression import Call, Rows, detach, map_rows
from lightning_vram.techniques.chunked_loss.lazy_logits import LazyLogits

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
        shape = (
            torch.empty(*logits.lead, 1, device="meta")[tuple(_on_meta(tokens))].shape
            if not _has_mask(tokens)
            else None
        )
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


def _has_mask(index: Sequence[Any]) -> bool:
    return any(isinstance(one, Tensor) and one.dtype == torch.bool for one in index)


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
