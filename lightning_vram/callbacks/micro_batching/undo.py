"""Undo a step: restore gradients, module, generators and the batch, and free the device's memory."""

import gc
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torchmetrics import Metric

from lightning_vram.core.batches.guard import BatchGuard
from lightning_vram.core.rollback.gradients import GradientState
from lightning_vram.core.rollback.step_rollback import BufferCopies, StepState
from lightning_vram.memory.device.allocator import empty_cache, has_cache
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.techniques.sharding import discard_failed_iteration


class StepUndo:
    """Saves what a step may change, except metrics and logged values, which each attempt restores."""

    def __init__(self, trainer: pl.Trainer, guard: BatchGuard) -> None:
        self._module = trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._guard = guard
        self._buffers = BufferCopies()
        self._parameters: list[Tensor] = []
        self._gradients: GradientState | None = None

    def remember(self, batch: Any, parameters: list[Tensor]) -> Callable[[], None]:
        """Save all but gradients; returns what restores the state, as often as it is called."""
        self._parameters, self._gradients = parameters, None
        try:
            return self._take(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._make_room()  # outside of the handler: the error holds on to the copies made so far
        return self._take(batch)

    def remember_gradients(self) -> None:
        """Save gradients once per step: before the first backward and after zeroing, when there are none to copy."""
        if self._gradients is None:
            self._gradients = GradientState(self._parameters)

    def forget_gradients(self) -> None:
        """Free the copies: the step counts, and the optimizer needs the memory."""
        self._gradients = None

    def _take(self, batch: Any) -> Callable[[], None]:
        state = StepState(self._module, self._device, self._buffers, skip=lambda member: isinstance(member, Metric))
        self._guard.watch(batch)

        def undo() -> None:
            self._guard.check()
            discard_failed_iteration(self._module)
            if self._gradients is not None:
                self._gradients.restore()
            state.restore()
            self._make_room()

        return undo

    def _make_room(self) -> None:
        gc.collect()
        if has_cache(self._device):
            empty_cache(self._device)
