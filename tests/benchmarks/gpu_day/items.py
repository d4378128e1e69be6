"""What an item of the day is, and the device that it runs on."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.benchmarks.gpu_day.results import Report

TESTS = Path(__file__).parents[2]
START_SECONDS = 5  # a process opens the device, and ends
TINY_LIMIT_SECONDS = 300


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
        name: The group, a dot, and the subject; also the name of its file.
        seconds: Estimate for an H100, without the start of the process.
        run: Adds rows to a report.
        row_seconds: Time limit of a row of :meth:`Report.attempt`: the process ends, and a new one continues.
        host_bytes: Host memory without which it is not started.
        shares: Whether it may run next to other items that share the device: nothing it reports depends on time, and
            it needs only a few GiB of the device.
        needs_cuda: Skipped on other devices.
    """

    name: str
    seconds: float
    run: Callable[[Setting, Report], None]
    row_seconds: float = 120
    host_bytes: int = 0
    shares: bool = False
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
        return 2 * self.estimate + 20


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

    def limit_of(self, item: Item) -> float:
        """Seconds after which ``item`` is ended; a dry run walks on machines of any speed."""
        return max(item.limit, TINY_LIMIT_SECONDS) if self.is_tiny else item.limit


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
