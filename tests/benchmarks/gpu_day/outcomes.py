"""A plugin of pytest that writes each test's outcome as it is known: ``-p tests.benchmarks.gpu_day.outcomes``."""

import json
import os
from pathlib import Path

import pytest

NUM_LINES = 15


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a line for each test that ran, was skipped, or failed in a fixture."""
    if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.passed):
        return
    lines = report.longreprtext.splitlines()[-NUM_LINES:] if report.failed else []
    row = {"name": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    row["traceback"] = [line[:300] for line in lines] or [report.outcome]
    with Path(os.environ["GPU_DAY_OUTCOMES"]).open("a") as file:
        file.write(json.dumps(row) + "\n")
