"""What a running estimate is doing, a line on a terminal; and its results as people see them."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_WIDTH = 60  # of a stage's name, in characters


@contextmanager
def show_progress(
    trainer: pl.Trainer | None = None, *, console: Console | None = None
) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows a stage, and which share of it is done.

    Nothing is left on the screen at the end, nothing is written where there is no terminal, or where ``trainer`` shows
    no progress bar. By default it writes to stderr, so that the answer alone goes to stdout.
    """
    console = console or Console(stderr=True)
    is_shown = trainer is None or (trainer.is_global_zero and trainer.progress_bar_callback is not None)
    name = TextColumn("{task.description}", table_column=Column(max_width=_WIDTH, no_wrap=True, overflow="ellipsis"))
    columns = (SpinnerColumn(), name, BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not (is_shown and console.is_terminal)
    ) as progress:
        task = progress.add_task("", visible=False, total=1.0)

        def show(stage: str, done: float) -> None:
            if stage != progress.tasks[0].description:
                progress.reset(task, description=stage, visible=True)
            progress.update(task, completed=done)

        yield show


def shown(work: Callable[_P, Any], kind: type[_Result]) -> Callable[_P, _Result]:
    """Let a function return ``kind``, a dataclass derived from that of its results, which can be printed and drawn.

    It shows on a terminal what it is doing, unless its caller passes an ``on_progress``.
    """

    @functools.wraps(work)
    def work_and_show(*args: _P.args, **kwargs: _P.kwargs) -> _Result:
        if kwargs.get("on_progress") is not None:
            found = work(*args, **kwargs)
        else:
            with show_progress() as kwargs["on_progress"]:
                found = work(*args, **kwargs)
        return kind(**{field.name: getattr(found, field.name) for field in fields(found)})

    return work_and_show
