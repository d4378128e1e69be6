"""Private names of torchmetrics: the states of a metric, and what it has shown last."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torchmetrics import Metric

APPLY = "_apply"
SYNC_STATES = "_sync_dist"


def default_states(metric: Metric) -> Mapping[str, Any]:
    """Return the states by name, as they begin."""
    return metric._defaults


def state_reductions(metric: Metric) -> Mapping[str, Any]:
    """Return by name how ranks merge states; ``None``: they do not."""
    return metric._reductions


def merge_states(metric: Metric, states: dict[str, Any], num_updates: int) -> None:
    """Merge other states into those of a metric.

    Args:
        metric: With the states of its latest update.
        states: Of all updates before.
        num_updates: Of both together.
    """
    metric._update_count = num_updates
    metric._reduce_states(states)


def forget_computed(metric: Metric) -> None:
    """Let the next ``compute`` compute, and ask no other rank."""
    metric._to_sync = metric._should_unsync = False
    metric._computed = None


def shown_value(metric: Metric) -> Any:
    """Return what the metric shows of the last batch."""
    return metric._forward_cache


def show_value(metric: Metric, value: Any) -> None:
    """Let the metric show ``value`` for the last batch."""
    metric._forward_cache = value


def converts_dtype(metric: Metric) -> bool:
    """Whether what is applied to the states casts them."""
    return metric._dtype_convert


@contextmanager
def placed_on(metric: Metric, device: torch.device) -> Iterator[None]:
    """Let a metric take itself to be on ``device`` inside the block. Its states stay where they are."""
    before, metric._device = metric._device, device
    try:
        yield
    finally:
        metric._device = before
