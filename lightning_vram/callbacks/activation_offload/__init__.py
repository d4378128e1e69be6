"""See :class:`ActivationOffload`."""

from lightning_vram.callbacks.activation_offload.callback import ActivationOffload

__all__ = ["ActivationOffload"]
