"""The command ``estimate``: will the run of a configuration fit a device that is not here?"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from rich.console import RenderableType

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.report.estimate import ShownEstimate, check_plot_path, estimate_table

ESTIMATE = "estimate"


class EstimateQuestion:
    """Whether a run fits.

    Args:
        estimate_memory: Called with module, batch, and the arguments of a question by their names.
    """

    name = verb = ESTIMATE
    description = "Estimate whether a run fits a GPU you do not have, and what uses its memory."

    def __init__(self, estimate_memory: Callable[..., ShownEstimate]) -> None:
        self._estimate_memory = estimate_memory
        self._estimate: ShownEstimate | None = None
        self._plot: str | None = None

    def add_arguments(self, parser: LightningArgumentParser) -> None:
        """Add the picture."""
        text = "File for a picture of the step: .png, .svg, .pdf or .html."
        parser.add_argument("--plot", type=str | None, default=None, help=text)

    def check(self, config: Namespace, spec: DeviceSpec) -> None:
        """Refuse what no picture can be written to."""
        if config.plot is not None:
            check_plot_path(Path(config.plot))

    def ask(self, config: Namespace, module: LightningModule, batch: Any, **arguments: Any) -> None:
        """Estimate, and draw."""
        self._estimate, self._plot = self._estimate_memory(module, batch, **arguments), config.plot
        if self._plot is not None:
            self._estimate.plot(self._plot)

    def answer(self) -> Iterator[RenderableType]:
        """Return the table."""
        assert self._estimate is not None  # it was asked for
        yield estimate_table(self._estimate)
        if self._plot is not None:
            yield f"\n{self._plot}: picture of the step."
