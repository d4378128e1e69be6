"""The folder of results: a small JSON file for each item, which is also the state that the next call goes on from.

It is written as things are found: a process that dies leaves what it had.
"""

import faulthandler
import json
import re
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measure import Row, describe_error, give_back

Result = dict[str, Any]
FINAL = ("done", "failed", "killed")  # not: "running", "cut" by the end of a call


def path_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def read(folder: Path, name: str) -> Result | None:
    """Return what an item has found so far."""
    try:
        return json.loads(path_of(folder, name).read_text())
    except (OSError, ValueError):  # none, or its process died while it wrote
        return None


def write(folder: Path, name: str, result: Result) -> None:
    """Replace an item's file at once, so that none is ever half written."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{name}.new"
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(path_of(folder, name))


def read_all(folder: Path) -> dict[str, Result]:
    """Return all results by the names of their items."""
    names = sorted(path.stem for path in folder.glob("*.json"))
    return {name: result for name in names if (result := read(folder, name)) is not None}


def has_errors(result: Result) -> bool:
    """Whether the item or one of its rows went wrong, or differs from what it should be equal to."""
    return result["status"] != "done" or any("error" in row or not row.get("is_met", True) for row in result["rows"])


def gather(folder: Path, file: Path) -> None:
    """Write all results into one file, with the machine's description."""
    found = read_all(folder)
    machines = [result["machine"] for result in found.values() if result.get("machine")]
    date = datetime.now(tz=UTC).date().isoformat()
    joined = {"machine": machines[-1] if machines else None, "date": date, "items": found}
    text = re.sub(r"/[^\"\s]*/site-packages/", "", json.dumps(joined, indent=1))  # paths of one machine
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def scatter(file: Path, folder: Path) -> Iterable[str]:
    """Write the results in a file of :func:`gather` into ``folder``; return their names."""
    items: dict[str, Result] = json.loads(file.read_text())["items"]
    for name, result in items.items():
        write(folder, name, result)
    return list(items)


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
        earlier = read(folder, name) or {}
        self._result: Result = {**earlier, "status": "running", "rows": earlier.get("rows", []), "at": None}
        self.write()

    def set(self, **values: Any) -> None:
        """Note what is not of one row."""
        self._result |= values
        self.write()

    def add(self, *rows: Row) -> None:
        self._result["rows"] += rows
        self.write()

    def write(self) -> None:
        write(self._folder, self._name, self._result)

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
