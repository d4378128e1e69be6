"""Private names of torchmetrics: the state of a metric, and its value for the last batch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torchmetrics import Metric

APPLY = "_apply"
SYNC_STATES = "_sync_dist"
default_states: Callable[[Metric], Mapping[str, Any]] = attrgetter("_defaults")  # the initial metric state by name
shown_value: Callable[[Metric], Any] = attrgetter("_forward_cache")  # the value for the last batch


def show_value(metric: Metric, value: Any) -> None:
    """Set the value for the last batch."""
    metric._forward_cache = value


converts_dtype: Callable[[Metric], bool] = attrgetter("_dtype_convert")  # whether ``_apply`` casts the metric state


@contextmanager
def placed_on(metric: Metric, device: torch.device) -> Iterator[None]:
    """Make a metric behave as if on ``device`` inside the block. Its state is not moved."""
    before, metric._device = metric._device, device
    try:
        yield
    finally:
        metric._device = before
