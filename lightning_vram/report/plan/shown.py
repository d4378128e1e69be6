"""A plan that can be printed and drawn. The planner knows nothing of tables: it belongs to a floor below."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ParamSpec

from typing_extensions import override

from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.report.pictures import write_plot
from lightning_vram.report.plan.figure import draw
from lightning_vram.report.plan.html import page
from lightning_vram.report.plan.table import plan_table
from lightning_vram.report.tables import as_text

_P = ParamSpec("_P")


@dataclass(frozen=True)
class ShownPlan(MemoryPlan):
    """A :class:`MemoryPlan` whose ``str`` is a table, and which draws itself."""

    @override
    def __str__(self) -> str:
        return as_text(plan_table(self))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw memory against step time of the configurations tried, with the budget.

        Args:
            path: File to write: a picture by matplotlib (``.png``, ``.svg``, ``.pdf``), or a page (``.html``) in one
                file, with the table of configurations.

        Raises:
            ValueError: If the file has another ending.
            ModuleNotFoundError: If matplotlib is needed and not installed.
        """
        write_plot(path, lambda: page(self), lambda: draw(self))


def shown(plan_memory: Callable[_P, MemoryPlan]) -> Callable[_P, ShownPlan]:
    """Let a function that plans return what can be printed and drawn."""

    @functools.wraps(plan_memory)
    def plan_and_show(*args: _P.args, **kwargs: _P.kwargs) -> ShownPlan:
        plan = plan_memory(*args, **kwargs)
        return ShownPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    return plan_and_show
