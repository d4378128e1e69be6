"""Messages of :class:`MetricOffload`."""

from collections.abc import Sequence

import torch
from torchmetrics import Metric

from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.metric_offload import GrowingList


def say_found(metrics: Sequence[Metric], device: torch.device) -> str:
    """Report which metrics are offloaded."""
    if not metrics:
        return "MetricOffload has no effect: no metric of the module stores lists."
    if device.type == "cpu":
        return "MetricOffload has no effect: the model is on the CPU, and so are its metrics' lists."
    kinds = ", ".join(sorted({type(metric).__name__ for metric in metrics}))
    return f"MetricOffload stores the lists of {len(metrics)} metrics on the CPU: {kinds}."


def say_called(called: Sequence[tuple[str, Metric]]) -> str:
    """Warn about metrics that are called, by their names."""
    metrics = ", ".join(f"{name} ({type(metric).__name__})" for name, metric in called)
    return (
        f"MetricOffload: a step calls metrics that store lists: {metrics}. Each call copies the whole list. Write "
        "`metric.update(preds, target)` instead of `metric(preds, target)`, and log the metric itself, "
        "`self.log('name', metric)`, or its value at the end of the epoch."
    )


def say_collected(found: Sequence[GrowingList], device: torch.device) -> str:
    """Warn about attributes that collect outputs on the device."""
    lists = ", ".join(
        f"`self.{one.name}` ({format_bytes(one.total_bytes)}, {format_bytes(one.growth_bytes)} more with each batch)"
        for one in found
    )
    return (
        f"MetricOffload: the module collects tensors on {device} in {lists}. Move them to the CPU, as in "
        f"`self.{found[0].name}.append(output.detach().cpu())`, or let a metric collect them."
    )
