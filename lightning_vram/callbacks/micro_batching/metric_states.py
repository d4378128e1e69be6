"""Metrics and logged values of a batch that runs in micro-batches, maybe more than once: those of one batch.

A metric accumulates each micro-batch as it would a batch: what it computes at the end of the epoch is the same, up to
the rounding of sums. An attempt that is dropped leaves no trace: tensor states are copied when a metric is updated.

What ``self.log("accuracy", self.accuracy)`` shows for the step is ``forward``'s value. The value of the batch is
computed from the states of its micro-batches, where ranks would merge them by sum, mean, minimum, maximum or
concatenation (``dist_reduce_fx``). Otherwise, as for ``PearsonCorrCoef`` and compositions of metrics, it is the
weighted mean of the micro-batches' values if they are floating tensors, and the last one if they are not.

Different from a run without micro-batches: counts of updates (``update_count``, windows of ``Running``), states that
are means over updates, what a wrapper computes from the values of batches (the extremes of ``MinMaxMetric``), and
metrics that average something per batch. A metric that is no submodule (in a list, say) is not found.
"""

from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_vram.callbacks.micro_batching.watched_metric import WatchedMetric
from lightning_vram.core.rollback.attribute_state import AttributeState
from lightning_vram.core.rollback.step_rollback import iterate_members


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
