"""The tests that need a device, in chunks that fit into a call.

To pytest this module is a plugin, which writes each test's outcome as it is known.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report

ROOT = Path(__file__).parents[3]
CHOICE = {
    "cuda": ["--device", "cuda"],
    "sim": ["--device", "sim"],
    "cpu": ["--device", "cuda", "-k", "allocator"],  # skipped, each with a reason
}
"""Options of pytest that choose the tests of a device."""

CHUNKS = {
    "memory_core": ("memory", "core"),
    "callbacks": ("callbacks",),
    "checkpointing": ("techniques/activation_checkpointing",),
    "offload": ("techniques/activation_offload",),
    "strategies": ("strategies",),
    "precision": ("precision", "optimizers", "techniques/mixed_precision"),
    "fusion": ("techniques/in_place_fusion",),
}
NUM_TRACEBACK_LINES = 15
SECONDS = {"memory_core": 60, "callbacks": 60, "strategies": 90, "precision": 60, "fusion": 90}
QUICK_SECONDS, NUM_QUICK_WORKERS = 150, 8
INTERNAL_ERROR = 3  # exit code of pytest
NUM_OUTPUT_LINES = 60
NUM_WORKERS = {"fusion": 4, "precision": 4}  # the others look at what is free on the device


def rest() -> tuple[str, ...]:
    """Return folders and files with tests that no chunk names."""
    named = {name for names in CHUNKS.values() for name in names}
    folders = [path for path in sorted((ROOT / "tests").iterdir()) if path.name not in ("benchmarks", "techniques")]
    folders += sorted((ROOT / "tests" / "techniques").iterdir())
    names = [str(path.relative_to(ROOT / "tests")) for path in folders if path.is_dir() or path.match("test_*.py")]
    return tuple(name for name in names if name not in named and not name.endswith("__pycache__"))


def run(
    setting: Setting, report: Report, *, folders: tuple[str, ...], num_workers: int, seconds: float, is_quick: bool
) -> None:
    """Run the tests of some folders; add a row for each that fails, and the numbers of all outcomes.

    Args:
        setting: Where.
        report: Gets the rows.
        folders: Below ``tests``.
        num_workers: Of pytest.
        seconds: After which pytest is ended; outcomes until then count.
        is_quick: One parametrisation of each test that is not slow; otherwise all.
    """
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch:
        log, output = Path(scratch, "outcomes"), Path(scratch, "output")
        options = ["--one-of-each", "-m", "not slow"] if is_quick or setting.is_tiny else ["-m", ""]
        options += [*CHOICE[setting.device.type], *(str(Path("tests", folder)) for folder in folders)]
        exit_code = _run_pytest(
            [*options, "-n", str(min(num_workers, 2) if setting.is_tiny else num_workers)], log, output, end
        )
        if exit_code == INTERNAL_ERROR:  # one process shows more than several
            report.set(first_output=output.read_text(errors="replace").splitlines()[-NUM_OUTPUT_LINES:])
            exit_code = _run_pytest([*options, "-n", "0"], log, output, end)
        if exit_code is None:
            report.set(error=f"time limit of {seconds:.0f} s")
        outcomes = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        report.set(exit_code=exit_code, output=output.read_text(errors="replace").splitlines()[-NUM_OUTPUT_LINES:])
    counts = {kind: sum(row["outcome"] == kind for row in outcomes) for kind in ("passed", "failed", "skipped")}
    report.set(counts=counts)
    report.add(*({**row, "error": row["traceback"][-1]} for row in outcomes if row["outcome"] == "failed"))
    report.set(
        slowest=[[row["name"], row["seconds"]] for row in sorted(outcomes, key=lambda row: -row["seconds"])[:10]]
    )


def _run_pytest(options: list[str], log: Path, output: Path, end: float) -> int | None:
    """Run pytest without plugins that happen to be installed; return its exit code, ``None`` where time ran out."""
    plugins = [word for name in ("xdist", "pytest_timeout", __name__) for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugins]
    command += ["--timeout", "90", "--tb", "short", "--continue-on-collection-errors"]
    environment = {**os.environ, "GPU_DAY_OUTCOMES": str(log), "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with output.open("w") as file:
        try:
            done = subprocess.run(
                [*command, *options],
                cwd=ROOT,
                env=environment,
                timeout=max(1, end - time.monotonic()),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            return None
    return done.returncode


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a line for each test that ran, was skipped, or failed in a fixture."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    lines = report.longreprtext.splitlines()[-NUM_TRACEBACK_LINES:] if report.failed else []
    row = {"name": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    row["traceback"] = [line[:300] for line in lines] or [report.outcome]
    with Path(os.environ["GPU_DAY_OUTCOMES"]).open("a") as file:
        file.write(json.dumps(row) + "\n")


def _item(name: str, folders: tuple[str, ...]) -> Item:
    seconds = SECONDS.get(name, 40)
    arguments = {"folders": folders, "num_workers": NUM_WORKERS.get(name, 0), "seconds": 2 * seconds}
    return Item(f"tests.{name}", seconds, partial(run, **arguments, is_quick=False))


_ALL = [*CHUNKS.items(), ("rest", rest())]
QUICK = Item(  # next to others: a test that looks at what is free on the device may fail
    "quick_tests.all",
    QUICK_SECONDS,
    partial(run, folders=("",), num_workers=NUM_QUICK_WORKERS, seconds=QUICK_SECONDS, is_quick=True),
    shares=True,
)
ITEMS = tuple(_item(name, folders) for name, folders in _ALL)
