"""The folder of results: a small JSON file for each item, which is also the state that the next call goes on from."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    """Whether the item or one of its rows went wrong."""
    return result["status"] != "done" or any("error" in row for row in result["rows"])


def gather(folder: Path, file: Path) -> None:
    """Write all results into one file, with the machine's description."""
    found = read_all(folder)
    machines = [result["machine"] for result in found.values() if result.get("machine")]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machines[-1] if machines else None, "items": found}) + "\n")


def scatter(file: Path, folder: Path) -> Iterable[str]:
    """Write the results in a file of :func:`gather` into ``folder``; return their names."""
    items: dict[str, Result] = json.loads(file.read_text())["items"]
    for name, result in items.items():
        write(folder, name, result)
    return list(items)
