"""The command ``estimate``: does the run of a configuration fit a GPU you do not have?"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from rich.console import RenderableType

from lightning_vram.commands.options import ESTIMATE
from lightning_vram.commands.program import DOES_NOT_FIT
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.report.estimate import ShownEstimate, estimate_memory, estimate_table
from lightning_vram.report.pictures import check_picture_path
from lightning_vram.report.values import estimate_values


class EstimateQuestion:
    """Whether a run fits."""

    name = ESTIMATE

    def __init__(self) -> None:
        self._estimate: ShownEstimate | None = None
        self._plot: str | None = None
        self._as_json, self.exit_code = False, 0

    def check(self, config: Namespace, spec: DeviceSpec) -> None:
        """Refuse what no picture can be written to."""
        if config.plot is not None:
            check_picture_path(Path(config.plot), has_page=True)

    def ask(self, config: Namespace, module: LightningModule, batch: Any, **arguments: Any) -> None:
        """Estimate, and draw."""
        self._as_json, self._plot = config.json, config.plot
        self._estimate = estimate_memory(module, batch, **arguments)
        self.exit_code = 0 if self._estimate.fits else DOES_NOT_FIT
        if self._plot is not None:
            self._estimate.plot(self._plot)

    def answer(self) -> Iterator[RenderableType]:
        """Return the table, or JSON."""
        assert self._estimate is not None  # it was asked for
        if self._as_json:
            yield json.dumps(estimate_values(self._estimate), indent=2)
            return
        yield estimate_table(self._estimate)
        if self._plot is not None:
            yield f"\n{self._plot}: picture of the step."
