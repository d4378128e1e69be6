"""The value that a metric returned for each micro-batch, and what it would have returned for the whole batch."""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_vram.core.batches.weighted_mean import weighted_mean
from lightning_vram.core.rollback.attribute_state import AttributeState
from lightning_vram.private_names.lightning.metrics import (
    default_states,
    forget_computed,
    merge_states,
    state_reductions,
)
from lightning_vram.private_names.torch.trees import tree_flatten, tree_unflatten

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


def value_of_batch(metric: Metric, shown: list[ShownValue]) -> Any:
    """The value of the batch, computed from the states of its micro-batches, or else a mean."""
    states = [one.states for one in shown if one.states is not None]
    if len(states) == len(shown) and _is_mergeable(metric):
        return _compute(metric, states)
    return _mean([one.value for one in shown], [one.share for one in shown])


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
    if not (all(spec == specs[0] for spec in specs) and all(map(_is_alike, columns))):
        return values[-1]
    return tree_unflatten([weighted_mean(column, shares, [1] * len(shares)) for column in columns], specs[0])


def _is_alike(values: tuple[Any, ...]) -> bool:
    return all(isinstance(v, Tensor) and v.is_floating_point() and v.shape == values[0].shape for v in values)
