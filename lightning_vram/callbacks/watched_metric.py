"""One torchmetrics metric during one try of a step: what it was before, and what its micro-batches showed."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_vram.callbacks.shadow import Shadow
from lightning_vram.techniques.attribute_state import AttributeState
from lightning_vram.techniques.weighted_mean import weighted_mean

_MERGEABLE = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat)

_NOTES = "_shown_by_micro_batches"

States = dict[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True)
class _Shown:
    """What ``forward`` returned in a micro-batch.

    Args:
        chunk: Number of the micro-batch.
        share: Of the micro-batch.
        value: The value, without its past: a graph would keep all that the micro-batch saved for backward.
        states: The micro-batch's own states, where the value was computed from states; without their past.
        original: The very object that the metric keeps, of the latest call only.
    """

    chunk: int
    share: float | Tensor
    value: Any
    states: States | None
    original: Any


class WatchedMetric:
    """A metric from the beginning of a try to its end.

    Args:
        metric: The metric. Until the end it works on copies of its tensor states, made where it writes to them.
        num_chunks: How many micro-batches will come.
    """

    def __init__(self, metric: Metric, num_chunks: int) -> None:
        self._metric = metric
        if _NOTES not in vars(metric):  # else somebody watches this batch already
            metric._forward_cache = _without_past(metric._forward_cache)  # the graph of the last batch would live on
        self._before = AttributeState(metric, max_items=sys.maxsize)  # forward empties lists of any length
        attributes = vars(metric)
        self._originals: dict[str, Tensor] = {
            name: attributes[name] for name in metric._defaults if isinstance(attributes.get(name), Tensor)
        }
        self._chunk = 0
        self._share: float | Tensor = 1.0
        self._shown: list[_Shown] = []
        self._states: States | None = None
        self._shadows = [Shadow(metric, "update", self._make_update)]
        if num_chunks > 1:
            self._shadows.append(Shadow(metric, "forward", self._make_forward))
            self._shadows.append(Shadow(metric, "compute", self._make_compute))
            attributes[_NOTES] = self._shown  # taken back with the other attributes by one who drops a part of this try

    def start_chunk(self, share: float | Tensor) -> None:
        """Call before each micro-batch."""
        is_shown = self._is_last_shown()
        value = self._let_go(self._shown[-1].value if is_shown else None)
        if is_shown:
            self._metric._forward_cache = value
        self._chunk += 1
        self._share = share

    def restore(self) -> None:
        """Put the metric back into its state at the beginning."""
        self._remove_shadows()
        self._before.restore()

    def finish(self) -> None:
        """Keep what was accumulated, and show the value of the batch."""
        self._remove_shadows()
        shown = list({chunk.chunk: chunk for chunk in self._shown}.values())  # of several calls in each the last
        if len(shown) < 2 or not self._is_last_shown():
            return
        states = [chunk.states for chunk in shown if chunk.states is not None]
        if len(states) == len(shown) and _is_mergeable(self._metric):
            self._metric._forward_cache = _compute(self._metric, states)
        else:
            self._metric._forward_cache = _mean([chunk.value for chunk in shown], [chunk.share for chunk in shown])

    def _is_last_shown(self) -> bool:
        cache = self._metric._forward_cache
        return bool(self._shown) and cache is not None and cache is self._shown[-1].original

    def _let_go(self, original: Any = None) -> Any:
        """Forget the object that the latest call returned, and with it the graph of the micro-batch."""
        if self._shown:
            self._shown[-1] = replace(self._shown[-1], original=original)
        return original

    def _remove_shadows(self) -> None:
        for shadow in reversed(self._shadows):
            shadow.remove()
        if vars(self._metric).get(_NOTES) is self._shown:
            del vars(self._metric)[_NOTES]

    def _make_update(self, update: Call) -> Call:
        def update_on_copies(*args: Any, **kwargs: Any) -> Any:
            attributes = vars(self._metric)
            for name, original in self._originals.items():
                if attributes.get(name) is original:
                    with torch.no_grad(), torch.inference_mode(mode=original.is_inference()):
                        attributes[name] = original.clone()
            return update(*args, **kwargs)

        return update_on_copies

    def _make_forward(self, forward: Call) -> Call:
        def forward_and_note(*args: Any, **kwargs: Any) -> Any:
            self._states = None
            value = forward(*args, **kwargs)
            if value is not None and self._metric._forward_cache is value:
                self._let_go()
                self._shown.append(_Shown(self._chunk, self._share, _without_past(value), self._states, value))
            return value

        return forward_and_note

    def _make_compute(self, compute: Call) -> Call:
        def note_and_compute(*args: Any, **kwargs: Any) -> Any:
            states = {name: _without_past(state) for name, state in _read_states(self._metric).items()}
            self._states = states  # forward merges them into new ones, or drops them
            return compute(*args, **kwargs)

        return note_and_compute


def _is_mergeable(metric: Metric) -> bool:
    """Whether ranks would merge its states, and so micro-batches can."""
    if isinstance(metric, WrapperMetric) or metric.dist_sync_on_step or not metric._defaults:
        return False  # a value that ranks exchange: they may not have run as many micro-batches
    return all(
        reduction in _MERGEABLE or (reduction is None and isinstance(metric._defaults[name], list))
        for name, reduction in metric._reductions.items()
    )


@torch.no_grad()
def _compute(metric: Metric, chunks: list[States]) -> Any:
    """The value of the batch, as ``forward`` computes it: from the states of all its micro-batches."""
    now = AttributeState(metric, max_items=sys.maxsize)
    merged = chunks[0]
    for count, states in enumerate(chunks[1:], start=2):
        vars(metric).update(states)
        metric._update_count = count
        metric._reduce_states(merged)
        merged = _read_states(metric)
    metric._to_sync = metric._should_unsync = metric.compute_on_cpu = False
    metric._computed = None
    value = metric.compute()
    now.restore()
    return value


def _read_states(metric: Metric) -> States:
    return {name: getattr(metric, name) for name in metric._defaults}


def _without_past(value: Any) -> Any:
    """A nest of tensors cut off from what they were computed from; the same object if nothing needs gradients."""
    leaves, spec = tree_flatten(value)
    if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return value
    return tree_unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _mean(values: list[Any], shares: list[float | Tensor]) -> Any:
    """Mean over nests of floating tensors that are alike; else the last value."""
    leaves, specs = zip(*map(tree_flatten, values), strict=True)
    columns = list(zip(*leaves, strict=False))
    is_alike = all(spec == specs[0] for spec in specs) and all(map(_is_alike, columns))
    if not is_alike:
        return values[-1]
    return tree_unflatten([weighted_mean(column, shares, [1] * len(shares)) for column in columns], specs[0])


def _is_alike(values: tuple[Any, ...]) -> bool:
    return all(isinstance(v, Tensor) and v.is_floating_point() and v.shape == values[0].shape for v in values)
