"""See :class:`MetricOffload`."""

from lightning_vram.callbacks.metric_offload.callback import MetricOffload

__all__ = ["MetricOffload"]
