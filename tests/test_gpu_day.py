"""The day on a GPU goes on where it stopped, whatever happens to an item."""

import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support.simdevice import build

from tests.benchmarks.gpu_day import agenda, device_tests, results
from tests.benchmarks.gpu_day.items import Item, Job
from tests.benchmarks.gpu_day.schedule import run_items

ROOT = Path(__file__).parents[1]


def rows_of(setting, report, *, rows):
    for name, function in rows.items():
        report.attempt(name, function)


def make_item(name, **rows):
    return Item(name, 1, partial(rows_of, rows=rows), row_seconds=2)


def fail(error):
    raise error


def run(folder, *items, minutes=5, **options):
    return run_items(items, Job("cpu", folder, **options), minutes)


def outcomes(folder, name):
    return {row["name"]: row.get("error") for row in results.read(folder, name)["rows"]}


@pytest.mark.slow
def test_what_goes_wrong_in_a_row_is_written_down_and_the_rest_goes_on(tmp_path):
    item = make_item(
        "group.item",
        wrong=lambda: fail(ValueError("no such thing")),
        full=lambda: fail(torch.OutOfMemoryError("CUDA out of memory.")),
        lost=lambda: fail(RuntimeError("CUDA error: an illegal memory access was encountered")),
        dead=lambda: os.abort(),
        slow=lambda: time.sleep(60),
        good=lambda: {"figure": 1},
    )
    assert run(tmp_path, item) == []
    assert outcomes(tmp_path, "group.item") == {
        "wrong": "ValueError: no such thing",
        "full": "out of memory",
        "lost": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "dead": "signal SIGABRT",
        "slow": "time limit of a row (exit code 1)",
        "good": None,
    }
    result = results.read(tmp_path, "group.item")
    assert result["status"] == "done"
    assert "in fail" in result["rows"][0]["traceback"][-2] + result["rows"][0]["traceback"][-3]
    assert any("Timeout" in line for line in result["rows"][4]["traceback"])
    assert {"device", "torch", "lightning"} <= set(result["machine"])


@pytest.mark.slow
def test_an_item_that_the_end_of_a_call_cuts_goes_on_behind_its_last_row(tmp_path):
    item = Item("group.item", -4.5, partial(rows_of, rows={"good": dict, "slow": lambda: time.sleep(1.5) or {}}))
    run(tmp_path, item, minutes=1 / 60)
    assert results.read(tmp_path, "group.item")["status"] == "cut"
    assert outcomes(tmp_path, "group.item") == {"good": None}
    run(tmp_path, item)
    assert results.read(tmp_path, "group.item")["status"] == "done"
    assert outcomes(tmp_path, "group.item") == {"good": None, "slow": None}


@pytest.mark.slow
def test_an_item_is_ended_with_all_that_it_started(tmp_path):
    """Compilers have process groups of their own, and parents that end before they do."""
    marker = f"sleep 98.{os.getpid()}"

    def start_and_wait():
        subprocess.Popen(["bash", "-c", f"{marker} & exit"], process_group=0).wait()
        time.sleep(60)

    item = Item("group.item", -13, partial(rows_of, rows={"slow": start_and_wait}))  # a limit of 4 seconds
    before = time.monotonic()
    run(tmp_path, item)
    assert time.monotonic() - before < 30
    assert outcomes(tmp_path, "group.item") == {"slow": "time limit"}
    while is_running(marker):  # a killed process takes a while to go on a busy machine
        assert time.monotonic() - before < 60
        time.sleep(0.1)


def is_running(command):
    files = list(Path("/proc").glob("[0-9]*/cmdline"))
    return any(file.read_bytes() == command.replace(" ", "\0").encode() + b"\0" for file in files if file.exists())


def test_chunks_hold_all_tests_once():
    folders = [ROOT / "tests" / folder for item in device_tests.ITEMS for folder in item.run.keywords["folders"]]
    files = [file for folder in folders for file in ([folder] if folder.is_file() else folder.rglob("test_*.py"))]
    assert len(set(files)) == len(files)
    assert set(files) == set((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(840)
@pytest.mark.parametrize("group", agenda.GROUPS)
def test_a_dry_run_walks_through_an_item_of_each_kind(group, tmp_path):
    file, device = tmp_path / "all.json", "sim" if build.why_not() is None else "cpu"
    kinds: dict[object, str] = {}  # by the function that an item runs
    for item in agenda.choose("", "", Job(device, tmp_path, is_tiny=True)):
        kinds.setdefault(getattr(item.run, "func", item.run), item.name)
    names = [item.name for item in agenda.GROUPS[group] if item.name in kinds.values()]
    command = [sys.executable, "-m", "tests.benchmarks.gpu_day", "--dry-run", "--device", device, "--gather", str(file)]
    options = ["--items", group, "--only", f"^({'|'.join(map(re.escape, names))})$", "--minutes", "13"]
    subprocess.run([*command, *options], cwd=ROOT, check=True, timeout=800)
    items = json.loads(file.read_text())["items"]
    assert set(items) == {*names}
    assert [name for name, result in items.items() if result["status"] != "done" or results.has_errors(result)] == []


SPY = """
import os
import torch

if not torch.cuda._is_compiled():
    import torch._dynamo  # it imports more where there is CUDA
calls = []
torch._C._cuda_getDeviceCount = lambda: calls.append("devices were counted") or 0  # now any build counts as CUDA's
torch.cuda._lazy_init = lambda: calls.append("CUDA was initialized")
import tests.benchmarks.gpu_day.__main__
print(calls)
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # Lightning counts by NVML, which opens no driver
torch.cuda.is_available()
print(calls)
"""


@pytest.mark.slow
def test_importing_the_items_opens_no_driver():
    """They are forked from a process that has imported all: CUDA cannot be initialized again after a fork."""
    command = [sys.executable, "-W", "ignore", "-c", SPY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    while_importing, after_a_question = done.stdout.splitlines()
    assert while_importing == "[]"
    assert after_a_question == "['devices were counted']"  # the spy sees what it is there for
