"""The batch that is running, and the memory that the last ones left allocated."""

from collections import deque
from typing import Any

import lightning.pytorch as pl
import torch

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

    def end_batch(self, trainer: pl.Trainer) -> None:
        """Record that it has ended, and what is allocated on the device."""
        self.batch = None
        allocated_bytes = _allocated_bytes(trainer.strategy.root_device)
        if allocated_bytes is not None:
            num_before = self.ends[-1][0] if self.ends else 0
            if self.stage == "train":
                num_before = trainer.fit_loop.epoch_loop.total_batch_idx
            self.ends.append((num_before + 1, allocated_bytes))


def _allocated_bytes(device: torch.device) -> int | None:
    return read_allocator(device).allocated_bytes if has_cache(device) else None
