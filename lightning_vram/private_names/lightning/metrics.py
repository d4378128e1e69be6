"""Private names of torchmetrics: the states of a metric, and what it has shown last.

Of ``torchmetrics.Metric``:

* ``_defaults``: the states by name, as they begin | 1.9 - | MicroBatching fails where the module has metrics
* ``_reductions``: how ranks merge states | 1.9 - | MicroBatching fails where a metric is logged by the step
* ``_reduce_states``: merges states | 1.9 - | MicroBatching fails where a metric is logged by the step
* ``_update_count``: of how many updates the states are, by which means are merged | 1.9 - | means of micro-batches that
  are logged by the step are wrong
* ``_to_sync``: whether ``compute`` asks other ranks | 1.9 - | MicroBatching may wait for ever for ranks that run fewer
  parts
* ``_should_unsync``: whether ``compute`` takes back what it asked for | 1.9 - | nothing: set as torchmetrics sets it
* ``_computed``: what ``compute`` has returned, and returns again | 1.9 - | what is logged by the step is the value of
  the last micro-batch
* ``_forward_cache``: the value of the last batch, which is logged | 1.9 - | MicroBatching fails where the module has
  metrics
* ``_apply``: moves the states, for ``to`` and Lightning's logging | 1.9 - | MetricOffload fails where the module has
  metrics with lists
* ``_sync_dist``: gathers the states of all ranks | 1.9 - | MetricOffload fails where the module has metrics with lists
* ``_device``: where new states are made | 1.9 - | MetricOffload fails where a metric with lists is on a device
* ``_dtype_convert``: whether ``_apply`` is for ``set_dtype`` | 1.9 - | MetricOffload fails where a metric is moved
"""

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
