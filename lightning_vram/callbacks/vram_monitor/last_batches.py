"""The batch that is running, and the memory that the last ones left allocated."""

from collections import deque
from typing import Any

import lightning.pytorch as pl

from lightning_vram.memory.device.allocator import has_cache, read_allocator
from lightning_vram.memory.tracking.timeline import MemoryTimeline

_NUM_ENDS = 64


class LastBatches:
    """The running batch of one run, and the ends of the last ones."""

    def __init__(self) -> None:
        self.stage = "train"
        self.batch: Any = None  # that is running
        self.batch_idx = 0
        self.timeline: MemoryTimeline | None = None  # of what was tracked in a batch that has ended in an error
        self._ends: dict[str, deque[tuple[int, int]]] = {}

    @property
    def ends(self) -> deque[tuple[int, int]]:
        """Batches of this stage so far, and bytes in tensors at their ends: each evaluation counts for itself."""
        return self._ends.setdefault(self.stage, deque(maxlen=_NUM_ENDS))

    def switch_stage(self, stage: str) -> None:
        """Record what runs now. Training continues where it was."""
        self.stage = stage
        if stage != "train":
            self._ends.pop(stage, None)

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Record that a batch begins."""
        self.batch, self.batch_idx = batch, batch_idx

    def end(self) -> None:
        """Record that it has ended."""
        self.batch = None

    def end_training_batch(self, trainer: pl.Trainer) -> None:
        """Record that it has ended, and what is allocated on the device."""
        self._end(trainer, trainer.fit_loop.epoch_loop.total_batch_idx + 1)

    def end_evaluation_batch(self, trainer: pl.Trainer) -> None:
        """Record the end of a batch of another stage."""
        self._end(trainer, self.ends[-1][0] + 1 if self.ends else 1)

    def _end(self, trainer: pl.Trainer, num_batches: int) -> None:
        self.end()
        device = trainer.strategy.root_device
        if has_cache(device):
            self.ends.append((num_batches, read_allocator(device).allocated_bytes))
