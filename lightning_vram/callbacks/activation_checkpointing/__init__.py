"""See :class:`ActivationCheckpointing`."""

from lightning_vram.callbacks.activation_checkpointing.callback import ActivationCheckpointing

__all__ = ["ActivationCheckpointing"]
