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


def patch_evaluation_steps(trainer: pl.Trainer, get_runner: Callable[[], MicroBatchRunner]) -> list[Shadow]:
    """Let ``get_runner()`` run the evaluation steps of the strategy, until the patches are removed."""

    def step(inner: Callable[..., Any], /, batch: Any, *args: Any) -> Any:
        runner = get_runner()
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and runner.retries:
            sync_buffers(model)  # not inside of an attempt, which must not wait for other ranks
        outputs = runner.run(batch, lambda part: inner(part.batch, *args))
        if len(outputs) == 1:
            return outputs[0][1]
        parts = [part for part, _ in outputs]
        return combine_step_outputs(trainer.lightning_module, [output for _, output in outputs], parts)

    steps = ("validation_step", "test_step", "predict_step")
    return [Shadow(trainer.strategy, name, partial(partial, step)) for name in steps]
