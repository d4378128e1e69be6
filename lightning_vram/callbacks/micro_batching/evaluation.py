"""Validation, test and prediction steps in micro-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.callbacks.micro_batching.closure import combine_step_outputs
from lightning_vram.callbacks.micro_batching.runner import MicroBatchRunner
from lightning_vram.core.gradients.reduction import sync_buffers
from lightning_vram.core.surgery.shadow import Shadow


class MicroBatchEvaluation:
    """Replaces the evaluation steps of a strategy, until :meth:`remove`."""

    def __init__(self, trainer: pl.Trainer, get_runner: Callable[[], MicroBatchRunner]) -> None:
        self._trainer = trainer
        self._get_runner = get_runner
        steps = ("validation_step", "test_step", "predict_step")
        self._patches = [Shadow(trainer.strategy, name, partial(partial, self._step)) for name in steps]

    def remove(self) -> None:
        """Put the steps back. Calling it again does nothing."""
        for patch in self._patches:
            patch.remove()

    def _step(self, inner: Callable[..., Any], /, batch: Any, *args: Any) -> Any:
        runner = self._get_runner()
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and runner.retries:
            sync_buffers(model)  # not inside of an attempt, which must not wait for other ranks
        outputs = runner.run(batch, lambda part: inner(part.batch, *args))
        if len(outputs) == 1:
            return outputs[0][1]
        parts = [part for part, _ in outputs]
        return combine_step_outputs(self._trainer.lightning_module, [output for _, output in outputs], parts)
