"""An estimate that can be printed and drawn. The numbers know nothing of tables: they belong to a floor below."""

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import ParamSpec

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.text import Text
from typing_extensions import override

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.report.estimate.pictures import picture
from lightning_vram.report.estimate.step import peak_sentence, tables_of, verdict
from lightning_vram.report.tables import Rows, as_text

_MAX_MODULES = 11  # with all others
_MAX_NAME = 27


def estimate_table(estimate: MemoryEstimate) -> RenderableType:
    """Everything in an estimate, in about 30 lines of 100 columns, or more of fewer. It needs no colours."""
    sides = (Group(*_spaced(side)) for side in tables_of(estimate, _MAX_MODULES, _MAX_NAME))
    style = f"bold {'green' if estimate.fits else 'red'}"
    words = [Text(verdict(estimate), style=style), Text(peak_sentence(estimate))]
    notes = [Text(f"Note: {note}") for note in estimate.notes]
    # side by side where the terminal is wide enough for both
    return Group(*words, "", Columns(sides, padding=(0, 2)), *notes)


def _spaced(tables: Iterable[Rows]) -> Iterator[RenderableType]:
    for table in tables:
        yield table.terminal()
        yield ""


_P = ParamSpec("_P")


@dataclass(frozen=True)
class ShownEstimate(MemoryEstimate):
    """A :class:`MemoryEstimate` whose ``str`` is a table, and which draws itself."""

    @override
    def __str__(self) -> str:
        return as_text(estimate_table(self))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the memory of the training step by category, with the device's limit.

        Args:
            path: File to write: a picture (``.svg``; ``.png`` and ``.pdf`` by matplotlib), or an interactive page
                (``.html``) in one file, with tables.

        Raises:
            ValueError: If the file has another ending, or no tensor was on the device.
            ModuleNotFoundError: If matplotlib is needed and not installed.
        """
        picture(self).write(path)


def shown(estimate_memory: Callable[_P, MemoryEstimate]) -> Callable[_P, ShownEstimate]:
    """Let a function that estimates return what can be printed and drawn."""

    @functools.wraps(estimate_memory)
    def estimate_and_show(*args: _P.args, **kwargs: _P.kwargs) -> ShownEstimate:
        estimate = estimate_memory(*args, **kwargs)
        return ShownEstimate(**{field.name: getattr(estimate, field.name) for field in fields(estimate)})

    return estimate_and_show
