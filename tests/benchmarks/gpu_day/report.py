"""What an item has found, written as it is found: a process that dies leaves what it had."""

import faulthandler
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu_day import results
from tests.benchmarks.measure import Row, describe_error, give_back


class DeviceLostError(RuntimeError):
    """After such an error nothing works on the device in this process; another one goes on."""


class Report:
    """The rows of one item.

    Args:
        folder: Of the results.
        name: Of the item. Rows that an earlier process wrote are kept.
        device: Its memory is given back after each row.
        row_seconds: Longest time for a row.
    """

    def __init__(self, folder: Path, name: str, device: torch.device, row_seconds: float) -> None:
        self._folder, self._name = folder, name
        self._device = device
        self._row_seconds = row_seconds
        earlier = results.read(folder, name) or {}
        self._result: results.Result = {**earlier, "status": "running", "rows": earlier.get("rows", []), "at": None}
        self.write()

    def set(self, **values: Any) -> None:
        """Note what is not of one row."""
        self._result |= values
        self.write()

    def add(self, *rows: Row) -> None:
        self._result["rows"] += rows
        self.write()

    def write(self) -> None:
        results.write(self._folder, self._name, self._result)

    def attempt(self, name: str, function: Callable[[], Row]) -> None:
        """Add the row that ``function`` makes, or its error; nothing if an earlier process has done that.

        Raises:
            DeviceLostError: If the device needs a new process.
        """
        if any(row["name"] == name for row in self._result["rows"]):
            return
        self.set(at=name)  # should the process die here, its parent knows where
        faulthandler.dump_traceback_later(self._row_seconds, exit=True, file=2)
        start, is_lost = time.perf_counter(), False
        try:
            row = function()
        except Exception as error:
            row, is_lost = describe_error(error), _is_lost(error)
        faulthandler.cancel_dump_traceback_later()
        self._result["at"] = None
        self.add({"name": name, "row_seconds": round(time.perf_counter() - start, 3), **row})
        if is_lost:
            raise DeviceLostError
        give_back(self._device)


def _is_lost(error: Exception) -> bool:
    return not isinstance(error, torch.OutOfMemoryError) and "CUDA error" in str(error)
