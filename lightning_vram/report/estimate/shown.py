"""An estimate that can be printed and drawn. The numbers know nothing of tables: they belong to a floor below."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ParamSpec

from typing_extensions import override

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.report.estimate.figure import draw
from lightning_vram.report.estimate.html import page
from lightning_vram.report.estimate.table import estimate_table
from lightning_vram.report.pictures import write_plot
from lightning_vram.report.tables import as_text

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
            path: File to write: a picture by matplotlib (``.png``, ``.svg``, ``.pdf``), or an interactive page
                (``.html``) in one file, with tables.

        Raises:
            ValueError: If the file has another ending, or no tensor was on the device.
            ModuleNotFoundError: If matplotlib is needed and not installed.
        """
        write_plot(path, lambda: page(self), lambda: draw(self))


def shown(estimate_memory: Callable[_P, MemoryEstimate]) -> Callable[_P, ShownEstimate]:
    """Let a function that estimates return what can be printed and drawn."""

    @functools.wraps(estimate_memory)
    def estimate_and_show(*args: _P.args, **kwargs: _P.kwargs) -> ShownEstimate:
        estimate = estimate_memory(*args, **kwargs)
        return ShownEstimate(**{field.name: getattr(estimate, field.name) for field in fields(estimate)})

    return estimate_and_show
