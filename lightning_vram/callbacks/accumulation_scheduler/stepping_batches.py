"""Correct ``trainer.estimated_stepping_batches`` for a schedule."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_vram.private_names.lightning.connectors import RUN
from lightning_vram.techniques.accumulation_schedule import AccumulationSchedule


class SteppingBatches:
    """Changes the class of a trainer to one of the same name with another estimate, until :meth:`remove`.

    Learning rate schedules are made from the estimate, in ``configure_optimizers``. Lightning uses the factor of that
    moment: it estimates 16 where a schedule makes 10 steps. It is a property, which only a class can replace. A copy
    of the trainer, such as the one of a spawned worker process, has its original class.

    ``end`` is called when another run begins: the error of another callback can keep a run from being cleaned up.
    """

    def __init__(
        self, trainer: pl.Trainer, read_schedule: Callable[[], AccumulationSchedule], end: Callable[[], None]
    ) -> None:
        original = type(trainer)
        self._trainer = trainer
        self._original = original
        self._read_schedule: Callable[[], AccumulationSchedule] | None = read_schedule

        def estimate(trainer: Any) -> int | float:
            lightning_estimate: int | float = original.estimated_stepping_batches.__get__(trainer)  # sets up the data
            is_endless = trainer.max_epochs == -1 or trainer.num_training_batches == float("inf")
            if self._read_schedule is None or is_endless:
                return lightning_estimate
            steps = self._read_schedule().count_steps(trainer.num_training_batches, max(trainer.max_epochs, 1))
            return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)

        def run(trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._read_schedule is not None:
                end()
            return getattr(original, RUN)(trainer, *args, **kwargs)

        def reduce(trainer: Any, protocol: Any) -> Any:
            return self._unswap(original.__reduce_ex__(trainer, protocol))

        attributes = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        changed = {"estimated_stepping_batches": property(estimate), RUN: run, "__reduce_ex__": reduce}
        self._swapped = type(original.__name__, (original,), attributes | changed)
        trainer.__class__ = self._swapped

    def remove(self) -> None:
        """Put the class back. Calling it again does nothing."""
        self._read_schedule = None  # if another class was put over this one, it stays and passes calls on
        if type(self._trainer) is self._swapped:
            self._trainer.__class__ = self._original

    def _unswap(self, reduced: Any) -> Any:
        """Put the original class in ``(function, arguments, state ...)``."""
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *others = reduced
        arguments = (self._original if one is self._swapped else one for one in arguments)
        return _call, (function, *arguments), *others  # pickle looks at the class if it knows the function


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
