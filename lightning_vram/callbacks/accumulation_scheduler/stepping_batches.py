"""Let ``trainer.estimated_stepping_batches`` know about a schedule.

Learning rate schedules are made of it, in ``configure_optimizers``. Lightning goes by the factor of that moment: it
says 16 where a schedule makes 10 steps. It is a property, which only a class can replace.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_vram.private_names.lightning.connectors import RUN
from lightning_vram.techniques.accumulation_schedule import AccumulationSchedule


class SteppingBatches:
    """Changes the class of a trainer to one of the same name with another estimate, until :meth:`remove`.

    A copy of the trainer, such as worker processes get that are spawned, has the class it had before.

    Args:
        trainer: Of any class.
        read_schedule: Called when somebody asks, and the training data is set up.
        end: Called when another run begins: the error of another callback can keep a run from being put away.
    """

    def __init__(
        self, trainer: pl.Trainer, read_schedule: Callable[[], AccumulationSchedule], end: Callable[[], None]
    ) -> None:
        plain = type(trainer)
        self._trainer = trainer
        self._plain = plain
        self._read_schedule: Callable[[], AccumulationSchedule] | None = read_schedule

        def estimate(trainer: Any) -> int | float:
            lightning_estimate: int | float = plain.estimated_stepping_batches.__get__(trainer)  # sets up the data
            is_endless = trainer.max_epochs == -1 or trainer.num_training_batches == float("inf")
            if self._read_schedule is None or is_endless:
                return lightning_estimate
            steps = self._read_schedule().count_steps(trainer.num_training_batches, max(trainer.max_epochs, 1))
            return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)

        def run(trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._read_schedule is not None:
                end()
            return getattr(plain, RUN)(trainer, *args, **kwargs)

        def reduce(trainer: Any, protocol: Any) -> Any:
            return self._unswap(plain.__reduce_ex__(trainer, protocol))

        attributes = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
        changed = {"estimated_stepping_batches": property(estimate), RUN: run, "__reduce_ex__": reduce}
        self._swapped = type(plain.__name__, (plain,), attributes | changed)
        trainer.__class__ = self._swapped

    def remove(self) -> None:
        """Put the class back. Calling it again does nothing."""
        self._read_schedule = None  # one that somebody else's class was put over stays, and passes on
        if type(self._trainer) is self._swapped:
            self._trainer.__class__ = self._plain

    def _unswap(self, reduced: Any) -> Any:
        """Name the class that was there in ``(function, arguments, state ...)``."""
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *others = reduced
        arguments = (self._plain if one is self._swapped else one for one in arguments)
        return _call, (function, *arguments), *others  # pickle looks at the class if it knows the function


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
