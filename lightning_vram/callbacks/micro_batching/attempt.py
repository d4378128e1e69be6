"""One attempt to run a batch in micro-batches: it counts in metrics, norms and logs only if it succeeds."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import lightning.pytorch as pl
from torchmetrics import Metric

from lightning_vram.callbacks.micro_batching.batch_logging import BatchLogging
from lightning_vram.callbacks.micro_batching.metric_states import MetricStates
from lightning_vram.core.batches.guard import BatchGuard
from lightning_vram.core.batches.path import BatchSplitError
from lightning_vram.core.rollback.step_rollback import BufferCopies, StepState
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.private_names.lightning.logging import running_results
from lightning_vram.techniques.micro_batching import NormCounting

Output = TypeVar("Output")


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch."""

    batch: Any  # views of the batch
    size: int  # number of samples
    share: float  # weight in means
    factor: float  # of the loss
    is_first: bool
    is_last: bool
    is_idle: bool = False  # runs because other ranks have one more, and counts for nothing
    batch_dim: int = 0


Step = Callable[[MicroBatch], Output]


class MicroBatchAttempt:
    """Runs the micro-batches of a batch, once."""

    def __init__(
        self,
        trainer: pl.Trainer,
        metrics: MetricStates,
        guard: BatchGuard,
        *,
        is_training: bool,
        is_again: bool = False,  # whether an attempt of the same batch ran out of memory before
    ) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        results = running_results(trainer)
        self._logging = BatchLogging(results) if results is not None else None
        self._metrics = metrics
        self._guard = guard
        self._is_training = is_training
        self._norms: NormCounting | None = None
        self.is_again = is_again
        self._number = self._num_parts = 1  # of the part under way, and of all

    def run(self, micro_batches: Sequence[MicroBatch], step: Step[Output]) -> list[tuple[MicroBatch, Output]]:
        """Run ``step`` on each of them; returns what it returned, without the idle ones."""
        parts = [part for part in micro_batches if not part.is_idle]
        num_samples = sum(part.size for part in parts)
        self._num_parts = len(parts)
        self._metrics.begin(len(parts))
        if self._is_training and len(parts) > 1:
            self._norms = NormCounting(self._module)
        outputs = []
        with self._logging or nullcontext():
            for number, part in enumerate(micro_batches, 1):
                self._number = min(number, len(parts))  # the idle ones repeat the last part
                if part.is_idle:
                    self._run_idle(part, step)
                    continue
                self._metrics.start_micro_batch(part.share)
                if self._logging is not None:
                    self._logging.start_micro_batch(part.size, part.share)
                if self._norms is not None:
                    self._norms.begin_part(part.size / num_samples)
                lent = replace(part, batch=self._guard.lend(part.batch))
                outputs.append((lent, step(lent)))
        return outputs

    def keep(self) -> None:
        """Let it count. A collective if the user logs with ``sync_dist=True``."""
        self._guard.settle()
        if self._norms is not None:
            self._norms.finish()
        self._metrics.finish()
        if self._logging is not None:
            self._logging.replay()

    def drop(self) -> None:
        """Undo what it left in norms and metrics. Calling it again does nothing."""
        if self._norms is not None:
            self._norms.restore()
        self._metrics.restore()

    def add_note(self, error: BaseException) -> None:
        """Note on an error of the model that splitting may be the cause. The type of the error does not change."""
        is_of_cut = isinstance(error, BatchSplitError) or not isinstance(error, Exception) or is_out_of_memory(error)
        if self._num_parts == 1 or is_of_cut:
            return
        error.add_note(
            f"MicroBatching: this error is from micro-batch {self._number} of {self._num_parts}. If the whole "
            "batch runs without it, splitting is the cause, for example with a batch padded to its longest "
            "sample. Trim each micro-batch in MicroBatching(split=...), or in split_batch(batch, size) of the "
            "LightningModule. Name entries that belong to all samples in shared_keys=."
        )

    def _run_idle(self, part: MicroBatch, step: Step[Output]) -> None:
        device = self._trainer.strategy.root_device
        state = StepState(self._module, device, BufferCopies(), skip=lambda member: isinstance(member, Metric))
        metrics = MetricStates(self._module)
        metrics.begin(1)
        results = running_results(self._trainer)
        with BatchLogging(results) if results is not None else nullcontext():  # without replay
            try:
                step(replace(part, batch=self._guard.lend(part.batch)))
            finally:
                metrics.restore()
                state.restore()
