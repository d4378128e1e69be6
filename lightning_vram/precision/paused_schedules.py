"""Pause the learning rate where the optimizer did not step.

Lightning steps a schedule after every batch that could have stepped the optimizer: 16 times where gradients of 12
batches overflowed and 4 steps were made. Schedules that go by epochs are left alone, and so are those of manual
optimization, which the user's code steps.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_vram.core.surgery.shadow import Shadow


class PausedSchedules:
    """Stands in for ``lr_scheduler_step`` of a LightningModule, until :meth:`remove`.

    Args:
        module: That is being trained, with automatic optimization.
        configs: Of its schedules.
    """

    def __init__(self, module: pl.LightningModule, configs: Sequence[LRSchedulerConfig]) -> None:
        self._trainer = module.trainer
        self._configs = [config for config in configs if config.interval == "step"]
        self._num_missed = [0] * len(self._configs)  # steps of the optimizer that a schedule has to wait for
        self._shadow = Shadow(module, "lr_scheduler_step", self._make_step)

    def pause(self) -> None:
        """Take note of an optimizer step that was skipped."""
        self._num_missed = [number + 1 for number in self._num_missed]

    def remove(self) -> None:
        """Let schedules step as they did. Calling it again does nothing."""
        self._shadow.remove()

    def state_dict(self) -> list[int]:
        """What a checkpoint keeps."""
        return list(self._num_missed)

    def load_state_dict(self, state: Sequence[int]) -> None:
        """Go on from a checkpoint; one with other schedules is not ours to judge."""
        if len(state) == len(self._num_missed):
            self._num_missed = list(state)

    def _make_step(self, inner: Callable[..., Any]) -> Callable[..., None]:
        def step(scheduler: Any, /, *args: Any, **kwargs: Any) -> None:
            for index, config in enumerate(self._configs):
                if config.scheduler is scheduler and self._num_missed[index] >= self._steps_per_update(config):
                    self._num_missed[index] -= self._steps_per_update(config)
                    return
            inner(scheduler, *args, **kwargs)

        return step

    def _steps_per_update(self, config: LRSchedulerConfig) -> int:
        """Optimizer steps between two of the schedule, which Lightning counts in batches."""
        return config.frequency // gcd(config.frequency, self._trainer.accumulate_grad_batches)
