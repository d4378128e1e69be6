"""What a running estimate is doing, a line on a terminal; and its results as people see them."""

import functools
from collections.abc import Callable
from dataclasses import fields
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_WIDTH = 60  # of a stage's name, in characters


class ProgressDisplay:
    """Show the current stage: ``with ProgressDisplay() as on_progress: on_progress("tracing the step", 0.5)``.

    Nothing is left on the screen at the end. Without a terminal, as in a
    log file, nothing is written. By default it writes to stderr, so that the answer alone goes to stdout.
    """

    def __init__(self, console: Console | None = None, *, is_shown: bool = True) -> None:
        console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(max_width=_WIDTH, no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not (is_shown and console.is_terminal),
        )
        self._stage = ""

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Self:
        """Make one that is shown where the Trainer shows a progress bar, by rank zero."""
        return cls(is_shown=trainer.is_global_zero and trainer.progress_bar_callback is not None)

    def __call__(self, stage: str, done: float) -> None:
        """Show how far a stage is."""
        if stage != self._stage:
            for task in self._progress.task_ids:
                self._progress.remove_task(task)
            self._progress.add_task(stage, total=1.0)
            self._stage = stage
        self._progress.update(self._progress.task_ids[0], completed=done)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        self._progress.stop()


def shown(work: Callable[_P, Any], kind: type[_Result]) -> Callable[_P, _Result]:
    """Let a function return ``kind``, a dataclass derived from that of its results, which can be printed and drawn.

    It shows on a terminal what it is doing, unless its caller passes an ``on_progress``.
    """

    @functools.wraps(work)
    def work_and_show(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        if kwargs.get("on_progress") is not None:
            found = work(*args, **kwargs)
        else:
            with ProgressDisplay() as kwargs["on_progress"]:
                found = work(*args, **kwargs)
        return kind(**{field.name: getattr(found, field.name) for field in fields(found)})

    return work_and_show
