"""Metrics and logged values of a batch that runs in micro-batches, maybe more than once: those of one batch.

A metric accumulates each micro-batch as it would a batch: what it computes at the end of the epoch is the same, up to
the rounding of sums. An attempt that is dropped leaves no trace: tensor states are copied when a metric is updated.

The value of the batch, which ``self.log("accuracy", self.accuracy)`` shows, is computed from the states of its
micro-batches if ranks would merge them (``dist_reduce_fx``). Otherwise, as for ``PearsonCorrCoef`` and compositions,
it is the weighted mean of the micro-batches' values if they are floating tensors, else the last one.

Different from a run without micro-batches: counts of updates (``update_count``, windows of ``Running``), states that
are means over updates, what a wrapper computes from the values of batches (the extremes of ``MinMaxMetric``), and
metrics that average something per batch. A metric that is no submodule (in a list, say) is not found.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Self

import torch
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_vram.core.batches.micro_batches import weighted_mean
from lightning_vram.core.module_state import AttributeState, iterate_members
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.private_names.lightning import Metadata, ResultCollection, default_dtype
from lightning_vram.private_names.metrics import (
    default_states,
    forget_computed,
    merge_states,
    show_value,
    shown_value,
    state_reductions,
)
from lightning_vram.private_names.torch import tree_flatten, tree_unflatten

_MERGEABLE = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min, dim_zero_cat)

States = dict[str, Any]


@dataclass(frozen=True)
class ShownValue:
    """What ``forward`` of a metric returned in a micro-batch."""

    micro_batch: int  # its number
    share: float  # of the micro-batch
    value: Any  # detached: a graph would keep all that the micro-batch saved for backward
    states: States | None  # the micro-batch's own, detached; None if the value was not computed from states
    original: Any  # the very object that the metric stores, of the latest call only


def _is_mergeable(metric: Metric) -> bool:
    """Whether ranks would merge its states, and so micro-batches can."""
    if isinstance(metric, WrapperMetric) or metric.dist_sync_on_step or not default_states(metric):
        return False  # a value that ranks exchange: they may not have run as many micro-batches
    return all(
        reduction in _MERGEABLE or (reduction is None and isinstance(default_states(metric)[name], list))
        for name, reduction in state_reductions(metric).items()
    )


@torch.no_grad()
def _compute(metric: Metric, all_states: list[States]) -> Any:
    """The value of the batch, as ``forward`` computes it: from the states of all its micro-batches."""
    now = AttributeState(metric, max_items=sys.maxsize)
    merged = all_states[0]
    for count, states in enumerate(all_states[1:], start=2):
        vars(metric).update(states)
        merge_states(metric, merged, count)
        merged = read_states(metric)
    metric.compute_on_cpu = False
    forget_computed(metric)
    value = metric.compute()
    now.restore()
    return value


def read_states(metric: Metric) -> States:
    """Return the states by name, as they are."""
    return {name: getattr(metric, name) for name in default_states(metric)}


def detach_nest(value: Any) -> Any:
    """Detach a nest of tensors; the same object if nothing needs gradients."""
    leaves, spec = tree_flatten(value)
    if not any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return value
    return tree_unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _mean(values: list[Any], shares: list[float]) -> Any:
    """Mean over nests of floating tensors that are alike; else the last value."""
    leaves, specs = zip(*map(tree_flatten, values), strict=True)
    columns = list(zip(*leaves, strict=False))
    are_alike = all(
        isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape == column[0].shape
        for column in columns
        for leaf in column
    )
    if not are_alike or any(spec != specs[0] for spec in specs):
        return values[-1]
    return tree_unflatten([weighted_mean(column, shares, [1] * len(shares)) for column in columns], specs[0])


_NOTES = "_shown_by_micro_batches"

Call = Callable[..., Any]


class WatchedMetric:
    """A metric during one attempt. It works on copies of its tensor states, made where it writes to them."""

    def __init__(self, metric: Metric, num_micro_batches: int) -> None:
        self._metric = metric
        if _NOTES not in vars(metric):  # else another one watches this batch already
            show_value(metric, detach_nest(shown_value(metric)))  # the graph of the last batch would live on
        self._before = AttributeState(metric, max_items=sys.maxsize)  # forward empties lists of any length
        attributes = vars(metric)
        self._originals: dict[str, Tensor] = {
            name: attributes[name] for name in default_states(metric) if isinstance(attributes.get(name), Tensor)
        }
        self._number = 0  # of the micro-batch
        self._share: float = 1.0
        self._shown: list[ShownValue] = []
        self._states: States | None = None
        replaced = {"update": self._update}
        if num_micro_batches > 1:
            replaced |= {"forward": self._forward, "compute": self._compute}
            attributes[_NOTES] = self._shown  # an inner attempt that is dropped restores it with the other attributes
        self._patches = [MethodPatch(metric, name, partial(partial, run)) for name, run in replaced.items()]

    def start_micro_batch(self, share: float) -> None:
        """Call before each micro-batch."""
        if self._is_last_shown():
            value = self._shown[-1].value
            self._forget_latest(value)
            show_value(self._metric, value)
        else:
            self._forget_latest()
        self._number += 1
        self._share = share

    def restore(self) -> None:
        """Put the metric back into its state at the beginning."""
        self._remove_patches()
        self._before.restore()

    def finish(self) -> None:
        """Keep what was accumulated, and show the value of the batch."""
        self._remove_patches()
        shown = list({one.micro_batch: one for one in self._shown}.values())  # of several calls in each the last
        if len(shown) < 2 or not self._is_last_shown():
            return
        states = [one.states for one in shown if one.states is not None]
        if len(states) == len(shown) and _is_mergeable(self._metric):
            value = _compute(self._metric, states)
        else:
            value = _mean([one.value for one in shown], [one.share for one in shown])
        show_value(self._metric, value)

    def _is_last_shown(self) -> bool:
        cache = shown_value(self._metric)
        return bool(self._shown) and cache is not None and cache is self._shown[-1].original

    def _forget_latest(self, original: Any = None) -> None:
        """Drop the object that the latest call returned, and with it the graph of the micro-batch."""
        if self._shown:
            self._shown[-1] = replace(self._shown[-1], original=original)

    def _remove_patches(self) -> None:
        for patch in reversed(self._patches):
            patch.remove()
        if vars(self._metric).get(_NOTES) is self._shown:
            del vars(self._metric)[_NOTES]

    def _update(self, update: Call, /, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self._metric)
        for name, original in self._originals.items():
            if attributes.get(name) is original:
                with torch.no_grad(), torch.inference_mode(mode=original.is_inference()):
                    attributes[name] = original.clone()
        return update(*args, **kwargs)

    def _forward(self, forward: Call, /, *args: Any, **kwargs: Any) -> Any:
        self._states = None
        value = forward(*args, **kwargs)
        if value is not None and shown_value(self._metric) is value:
            self._forget_latest()
            self._shown.append(ShownValue(self._number, self._share, detach_nest(value), self._states, value))
        return value

    def _compute(self, compute: Call, /, *args: Any, **kwargs: Any) -> Any:
        # forward merges the states into new ones, or drops them
        self._states = {name: detach_nest(state) for name, state in read_states(self._metric).items()}
        return compute(*args, **kwargs)


class MetricStates:
    """All metrics in a module, from the beginning of an attempt to :meth:`restore` or :meth:`finish`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._metrics: list[WatchedMetric] = []
        self._collections: list[AttributeState] = []

    def begin(self, num_micro_batches: int = 1) -> None:
        """Save the states. With one micro-batch, metrics do exactly what they always do."""
        members = list(iterate_members(self._module))
        # Not isinstance: it takes as long as all the rest, Metric being an abstract class.
        metrics: Any = [member for member in members if Metric in type(member).__mro__]
        self._metrics = [WatchedMetric(metric, num_micro_batches) for metric in metrics]
        self._collections = [AttributeState(member) for member in members if isinstance(member, MetricCollection)]

    def start_micro_batch(self, share: float) -> None:
        """Call before each micro-batch; ``share`` is its weight in the batch."""
        for metric in self._metrics:
            metric.start_micro_batch(share)

    def restore(self) -> None:
        """Drop the attempt: everything is as at its beginning."""
        for metric in self._metrics:
            metric.restore()
        for collection in self._collections:
            collection.restore()
        self._metrics, self._collections = [], []

    def finish(self) -> None:
        """Keep the attempt: each metric shows the value of the batch. Call it before metrics are logged."""
        for metric in self._metrics:
            metric.finish()
        self._metrics, self._collections = [], []


@dataclass
class _Entry:
    """One call of ``log`` in one micro-batch."""

    value: Any  # detached, unless its graph was asked for
    size: int
    share: float
    options: dict[str, Any]  # all other arguments by name


class BatchLogging:
    """Inside the context, ``log`` calls of one attempt are recorded; :meth:`replay` makes them, once per batch."""

    # Lightning would treat each micro-batch as a batch: the step's value would be that of the last one, and the epoch's
    # mean would weigh each of them like the whole batch. Processes exchange values (``sync_dist=True``) once per name.
    # Lightning resets the values of the epoch before when the first batch logs, in each attempt; a second time it
    # changes nothing.

    def __init__(self, results: ResultCollection) -> None:
        self._results = results
        self._entries: dict[tuple[str, str, int], list[_Entry]] = {}
        self._num_micro_batches = 0
        self._size = 1
        self._share = 1.0
        self._occurrences: Counter[tuple[str, str]] = Counter()
        self._log: Callable[..., None] = results.log
        self._patch: MethodPatch | None = None

    def __enter__(self) -> Self:
        self._patch = MethodPatch(self._results, "log", replace_by(self._record))
        return self

    def __exit__(self, *error: object) -> None:
        assert self._patch is not None
        self._patch.remove()

    def start_micro_batch(self, size: int, share: float) -> None:
        """Call before each micro-batch. ``share`` is its weight in means, ``size`` where all shares are 0."""
        self._num_micro_batches += 1
        self._size, self._share = size, share
        self._occurrences.clear()

    def replay(self) -> None:
        """Log the batch, once. A name counts over the micro-batches that logged it."""
        entries, self._entries = self._entries, {}
        for (fx, name, _), calls in entries.items():
            value, options = calls[0].value, calls[0].options
            if self._num_micro_batches > 1 and isinstance(value, Tensor):
                value, options = _combine(fx, name, calls)
            self._log(fx, name, value, **options)

    def _record(self, fx: str, name: str, value: Tensor | Metric, **options: Any) -> None:
        occurrence = self._occurrences[fx, name]
        self._occurrences[fx, name] += 1
        saved = value if options.get("enable_graph") else recursive_detach(value)
        self._entries.setdefault((fx, name, occurrence), []).append(_Entry(saved, self._size, self._share, options))


def _combine(fx: str, name: str, calls: Sequence[_Entry]) -> tuple[Tensor, dict[str, Any]]:
    options = dict(calls[0].options)
    batch_sizes: list[Any] = [call.options.get("batch_size") for call in calls]
    weights = [call.share for call in calls]
    if set(batch_sizes) == {sum(call.size for call in calls)}:
        pass  # a constant of the module: the size of the whole batch, which it is
    elif None not in batch_sizes:
        if batch_sizes != [call.size for call in calls]:  # else it says nothing new, and the share knows of tokens
            weights = batch_sizes
        options["batch_size"] = sum(batch_sizes)
    values: list[Tensor] = [call.value for call in calls]
    meta = Metadata(fx, name, reduce_fx=options.get("reduce_fx", torch.mean))  # knows all ways to name a reduction
    if meta.is_mean_reduction:
        sizes = [call.size for call in calls]
        floats = torch.float32, torch.float64  # Lightning converts others
        values = [value if value.dtype in floats else value.to(default_dtype()) for value in values]
        return weighted_mean(values, weights, sizes), options
    if meta.is_sum_reduction:
        return reduce(torch.add, [value.long() if value.dtype is torch.bool else value for value in values]), options
    return reduce(torch.maximum if meta.is_max_reduction else torch.minimum, values), options
