"""Losses on logits that are not computed yet."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.techniques.chunked_loss.expression import Call, Rows, Whole, map_rows, read_autocast
from lightning_vram.techniques.chunked_loss.lazy_logits import LazyLogits
from lightning_vram.techniques.chunked_loss.row_chunks import compute_sum
from lightning_vram.techniques.chunked_loss.shapes import Function

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
        found = _against_classes(
            logits, (target, counted), partial(_of_class, function), named.get("reduction", "mean"), options
        )
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
    loss: Tensor = function(_wide(logits), column.squeeze(-1), reduction="none", **_in_dtype(options, logits))
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
    wide = _wide(logits)
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


def _wide(logits: Tensor) -> Tensor:
    """What each token adds to a loss is rounded once, in the sum."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _in_dtype(options: Mapping[str, Any], logits: Tensor) -> dict[str, Any]:
    weight = options.get("weight")
    return {**options, "weight": None if weight is None else weight.to(_wide(logits).dtype)}


def _choose(counted: Tensor) -> Tensor | None:
    """Return the places of the tokens that count, or ``None`` where it is not worth it to leave the others out."""
    places = counted.nonzero().squeeze(-1)
    return places if (len(counted) - len(places)) * _WORTH_DROPPING > len(counted) else None


LOSSES: dict[str, Function] = {"cross_entropy": classify, "nll_loss": classify, "kl_div": diverge}
