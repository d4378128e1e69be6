"""What was measured, and kept under tests/benchmarks/results/."""

import json
from pathlib import Path
from typing import Any

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from tests.benchmarks.measure import Row

PLAYED = Path(__file__).parents[1] / "results" / "estimate_played.json"
_KEEPS_WORKSPACES = ("2.11.", "2.12.", "2.13.", "2.14.")


def read_rows(path: Path = PLAYED) -> list[Row]:
    """Return a row of each case and version of PyTorch."""
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows


def device_of(row: Row, path: Path = PLAYED) -> DeviceSpec:
    """Return the card of a row, whose workspaces are those of its version of PyTorch, not of the present one."""
    machine: dict[str, Any] = json.loads(path.read_text())["machine"]
    return DeviceSpec(
        name="measured",
        memory_bytes=machine["memory_bytes"],
        capability=tuple(machine["capability"]),
        num_multiprocessors=machine["num_multiprocessors"],
        is_workspace_kept=row["torch"].startswith(_KEEPS_WORKSPACES),
    )
