"""Memory that is reserved and not used, and the page about memory that runs out."""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch

from lightning_vram import VRAMMonitor
from lightning_vram.demos import ByteGPT, SourceText
from lightning_vram.memory.device.accelerators import SETTING, VARIABLES, ProcessLimit
from lightning_vram.memory.units import GIB, MIB
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.measure import Row
from tests.benchmarks.whole_runs import trainer_options

EXPANDING, FIXED = "segments that expand", "fixed segments"


def run_lengths(setting: Setting, report: Report) -> None:
    """Add a row for each setting of the allocator, which a process reads once."""
    for name, value in ((EXPANDING, SETTING), (FIXED, "expandable_segments:False")):
        report.attempt(name, partial(_train_lengths, value, setting))


def _train_lengths(value: str, setting: Setting) -> Row:
    command = [sys.executable, "-m", "tests.benchmarks.gpu_day.fragmentation", setting.device.type]
    environment = {**os.environ, **dict.fromkeys(VARIABLES, value), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, "tiny"] if setting.is_tiny else command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def run_report(setting: Setting, report: Report) -> None:
    """Add a row with the page that a real lack of memory leads to."""
    report.attempt("page", partial(_run_out, setting))


def _run_out(setting: Setting) -> Row:
    length, width, num_layers = (64, 64, 2) if setting.is_tiny else (1024, 768, 12)
    module = ByteGPT(num_layers, width, 4, length)
    limit = None
    if setting.device.type != "cpu":
        limit = ProcessLimit(setting.device, 12 * MIB if setting.is_tiny else 6 * GIB)
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = trainer_options(setting.device) | {"max_steps": 3, "default_root_dir": folder}
            try:
                pl.Trainer(callbacks=[VRAMMonitor()], **options).fit(module, SourceText(16, length))
            except torch.OutOfMemoryError as error:
                files = sorted(path.name for path in Path(folder).iterdir())
                page = (Path(folder) / "out_of_memory.md").read_text()
                return {"notes": error.__notes__, "files": files, "page": page.splitlines()}
    finally:
        if limit is not None:
            limit.remove()
    return {}  # there is no limit on this device


LENGTHS = Item("running_out.lengths", 150, run_lengths, row_seconds=400)
PAGE = Item("running_out.page", 85, run_report, row_seconds=150, shares=True)
