"""What :class:`MetricOffload` says."""

from collections.abc import Sequence

import torch
from torchmetrics import Metric

from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.metric_offload import GrowingList


def say_found(metrics: Sequence[Metric], device: torch.device) -> str:
    """Say what is held on the host."""
    if not metrics:
        return "MetricOffload found no metric that collects lists: there is nothing to hold on the host."
    if device.type == "cpu":
        return "MetricOffload: the model is on the host, and so is all that its metrics collect: nothing is gained."
    kinds = ", ".join(sorted({type(metric).__name__ for metric in metrics}))
    return f"MetricOffload holds the lists of {len(metrics)} metrics on the host: {kinds}."


def say_called(called: Sequence[tuple[str, Metric]]) -> str:
    """Say which metrics are called, by their names."""
    metrics = ", ".join(f"{name} ({type(metric).__name__})" for name, metric in called)
    return (
        f"MetricOffload: metrics that collect lists are called in a step: {metrics}. Each call copies all that was "
        "collected. Write `metric.update(preds, target)` in the place of `metric(preds, target)`, and log the metric "
        "itself, `self.log('name', metric)`, or what it computes at the end of the epoch."
    )


def say_collected(found: Sequence[GrowingList], device: torch.device) -> str:
    """Say which attributes collect outputs."""
    lists = ", ".join(
        f"`self.{one.name}` ({format_bytes(one.total_bytes)}, {format_bytes(one.growth_bytes)} more with each batch)"
        for one in found
    )
    return (
        f"MetricOffload: the module collects tensors on {device} in {lists}. Move what is kept to the host, as in "
        f"`self.{found[0].name}.append(output.detach().cpu())`, or let a metric collect it."
    )
