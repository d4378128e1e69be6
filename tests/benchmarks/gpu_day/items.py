"""What an item of the day is, and the device that it runs on."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.gpu_day.results import Report

TESTS = Path(__file__).parents[2]
START_SECONDS = 5  # a process sees the device, and ends


@dataclass(frozen=True)
class Setting:
    """Where items run.

    Args:
        device: Of the models.
        is_tiny: Toys that walk the same way, for a machine without a GPU.
    """

    device: torch.device
    is_tiny: bool = False


@dataclass(frozen=True)
class Item:
    """Something to find out, in a process of its own.

    Args:
        name: The group, a dot, and what it is; the name of its file as well.
        seconds: Estimate for an H100, without the start of the process.
        run: Adds rows to a report.
        row_seconds: Longest time for a row of :meth:`Report.attempt`; then the process ends and another goes on.
        host_bytes: Host memory without which it is not started.
        after: Name of the item that has to have missed a goal; ``None``: runs always.
        needs_cuda: Is left out on other devices.
    """

    name: str
    seconds: float
    run: Callable[[Setting, Report], None]
    row_seconds: float = 120
    host_bytes: int = 0
    after: str | None = None
    needs_cuda: bool = False

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    @property
    def estimate(self) -> float:
        """Seconds with the start of the process."""
        return self.seconds + START_SECONDS

    @property
    def limit(self) -> float:
        """Seconds after which it is ended."""
        return 3 * self.estimate + 30


@dataclass(frozen=True)
class Job:
    """How items are run.

    Args:
        device: ``"cuda"``, ``"sim"`` or ``"cpu"``.
        folder: Of the results.
        is_tiny: See :class:`Setting`.
        is_fresh: Each process starts Python anew; otherwise it is forked from this one, which has imported everything.
        gathered: File into which all results are joined after each item.
    """

    device: str
    folder: Path
    is_tiny: bool = False
    is_fresh: bool = False
    gathered: Path | None = None


def open_device(name: str) -> torch.device:
    """Return the device called ``"cuda"``, ``"cpu"`` or ``"sim"``, ready for use.

    Raises:
        RuntimeError: If it is not there.
    """
    if name == "sim":
        sys.path.insert(0, str(TESTS))  # as pytest has it
        importlib.import_module("support.simdevice.trainer")  # a compiler builds it
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device: --device cpu, or --dry-run.")
    return torch.device(name) if name == "cpu" else torch.device(name, 0)
