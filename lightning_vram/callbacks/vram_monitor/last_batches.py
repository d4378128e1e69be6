"""The batch that is running, and what the last ones have left: for the page about memory that ran out."""

from collections import deque
from typing import Any

import lightning.pytorch as pl

from lightning_vram.memory.device.allocator import has_cache, read_allocator
from lightning_vram.memory.tracking.timeline import MemoryTimeline

_NUM_ENDS = 64


class LastBatches:
    """Those of one run.

    Attributes:
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        batch: That is running; ``None``: none is.
        batch_idx: Its index.
        timeline: Of what was tracked in it, once it has ended in an error; ``None``: nothing was.
    """

    def __init__(self) -> None:
        self.stage = "train"
        self.batch: Any = None
        self.batch_idx = 0
        self.timeline: MemoryTimeline | None = None
        self._ends: dict[str, deque[tuple[int, int]]] = {}

    @property
    def ends(self) -> deque[tuple[int, int]]:
        """Batches of this stage so far, and bytes in tensors at their ends: each evaluation counts for itself."""
        return self._ends.setdefault(self.stage, deque(maxlen=_NUM_ENDS))

    def switch_stage(self, stage: str) -> None:
        """Note what runs now. Training goes on where it was."""
        self.stage = stage
        if stage != "train":
            self._ends.pop(stage, None)

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Note that a batch begins."""
        self.batch, self.batch_idx = batch, batch_idx

    def end(self) -> None:
        """Note that it has ended."""
        self.batch = None

    def end_training_batch(self, trainer: pl.Trainer) -> None:
        """Note that it has ended, and what is alive on the device, if that tells."""
        self._end(trainer, trainer.fit_loop.epoch_loop.total_batch_idx + 1)

    def end_evaluation_batch(self, trainer: pl.Trainer) -> None:
        """The same for a batch of another stage."""
        self._end(trainer, self.ends[-1][0] + 1 if self.ends else 1)

    def _end(self, trainer: pl.Trainer, num_batches: int) -> None:
        self.end()
        device = trainer.strategy.root_device
        if has_cache(device):
            self.ends.append((num_batches, read_allocator(device).allocated_bytes))
