"""The day on a GPU goes on where it stopped, whatever happens to an item."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from support.simdevice import build

from tests.benchmarks.gpu_day import agenda, device_tests, goals, results
from tests.benchmarks.gpu_day.items import Item, Job
from tests.benchmarks.gpu_day.schedule import run_items
from tests.benchmarks.trace_text import reduce_trace

ROOT = Path(__file__).parents[1]


def rows_of(setting, report, *, rows):
    for name, function in rows.items():
        report.attempt(name, function)


def make_item(name, **rows):
    return Item(name, 1, partial(rows_of, rows=rows), row_seconds=2)


def fail(error):
    raise error


def run(folder, *items, minutes=5, **options):
    return run_items(items, Job("cpu", folder, **options), minutes, lambda item: True)


def outcomes(folder, name):
    return {row["name"]: row.get("error") for row in results.read(folder, name)["rows"]}


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
        "slow": "exit code 1",
        "good": None,
    }
    result = results.read(tmp_path, "group.item")
    assert result["status"] == "done"
    assert "in fail" in result["rows"][0]["traceback"][-2] + result["rows"][0]["traceback"][-3]
    assert any("Timeout" in line for line in result["rows"][4]["traceback"])
    assert {"device", "torch", "lightning"} <= set(result["machine"])


def test_an_item_that_fails_as_a_whole_is_written_down(tmp_path):
    def wrong(setting, report):
        raise KeyError("gone")

    run(tmp_path, Item("group.wrong", 1, wrong), make_item("group.next", good=dict))
    assert results.read(tmp_path, "group.wrong")["status"] == "failed"
    assert results.read(tmp_path, "group.wrong")["error"] == "KeyError: 'gone'"
    assert results.read(tmp_path, "group.next")["status"] == "done"


def test_what_does_not_fit_is_left_for_the_next_call_which_leaves_out_what_is_done(tmp_path):
    count = tmp_path / "count"

    def count_run():
        with count.open("a") as file:
            file.write("x")
        return {}

    folder = tmp_path / "results"
    short, long = make_item("group.short", good=count_run), Item("group.long", 1000, partial(rows_of, rows={}))
    assert run(folder, long, short, minutes=1) == ["group.long"]
    assert results.read(folder, "group.long") is None
    assert run(folder, short, long, minutes=30) == []
    assert count.read_text() == "x"


def test_an_item_that_the_end_of_a_call_cuts_goes_on_behind_its_last_row(tmp_path):
    item = Item("group.item", -4.5, partial(rows_of, rows={"good": dict, "slow": lambda: time.sleep(1.5) or {}}))
    run(tmp_path, item, minutes=1 / 60)
    assert results.read(tmp_path, "group.item")["status"] == "cut"
    assert outcomes(tmp_path, "group.item") == {"good": None}
    run(tmp_path, item)
    assert results.read(tmp_path, "group.item")["status"] == "done"
    assert outcomes(tmp_path, "group.item") == {"good": None, "slow": None}


def test_all_results_are_joined_in_a_file_and_read_back(tmp_path):
    run(tmp_path / "one", make_item("group.item", good=lambda: {"figure": 1}))
    results.gather(tmp_path / "one", tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text())["machine"]["torch"] == torch.__version__
    results.scatter(tmp_path / "all.json", tmp_path / "other")
    assert results.read_all(tmp_path / "other") == results.read_all(tmp_path / "one")


def test_a_call_that_is_cut_off_has_joined_what_was_found_before(tmp_path):
    file, seen = tmp_path / "all.json", tmp_path / "seen.json"
    look = make_item("group.second", good=lambda: {"copied": seen.write_text(file.read_text())})
    run(tmp_path / "one", make_item("group.first", good=lambda: {"figure": 1}), look, gathered=file)
    assert set(json.loads(seen.read_text())["items"]) == {"group.first"}
    assert json.loads(seen.read_text())["items"]["group.first"]["status"] == "done"


def test_a_profile_is_wanted_of_what_has_missed_its_goal(tmp_path):
    job = Job("cuda", tmp_path)
    item = next(item for item in agenda.ITEMS if item.name == "profile.gpt2_xl.checkpointing")
    assert not agenda.is_wanted(item, job)
    for seconds, is_wanted in ((1.0, False), (1.01, True), (float("nan"), True)):
        rows = [{"name": "ActivationCheckpointing()", "seconds_of_first": seconds}]
        results.write(tmp_path, item.after, {"status": "done", "rows": rows})
        assert agenda.is_wanted(item, job) == is_wanted


def test_names_of_items_are_those_of_goals_and_profiles():
    names = [item.name for item in agenda.ITEMS]
    assert len(set(names)) == len(names)
    assert {goal.item for goal in goals.GOALS} <= set(names)
    assert {item.after for item in agenda.ITEMS} - {None} <= {goal.item for goal in goals.GOALS}


def test_chunks_hold_all_tests_once():
    folders = [ROOT / "tests" / folder for item in device_tests.ITEMS for folder in item.run.keywords["folders"]]
    files = [file for folder in folders for file in ([folder] if folder.is_file() else folder.rglob("test_*.py"))]
    assert len(set(files)) == len(files)
    assert set(files) == set((ROOT / "tests").rglob("test_*.py"))


def test_a_trace_is_written_short():
    def entry(action, addr=0, size=512, stream=0):
        return {"action": action, "addr": addr, "size": size, "stream": stream}

    trace = [
        entry("segment_alloc", 64, 2048),
        entry("alloc", 64),
        entry("snapshot"),
        entry("free_requested", 64),
        entry("free_completed", 64),
        entry("alloc", 64, 1024, stream=7),
        entry("free_completed", 8, 256),
    ]
    row = reduce_trace({"device_traces": [[], trace]}, {"forward": 3, "backward": 7})
    assert row["phases"] == {"forward": "S:2048 +1:512", "backward": "-1 +2:1024@7 -:256"}


GROUPS = ("smoke plan", "tests speed sharded fits", "running_out traces profile losses")
"""Items by the first word of their names, in parts that a busy machine walks through in time."""


def dry_run(options, tmp_path):
    file, device = tmp_path / "all.json", "sim" if build.why_not() is None else "cpu"
    command = [sys.executable, "-m", "tests.benchmarks.gpu_day", "--dry-run", "--device", device, "--gather", str(file)]
    subprocess.run([*command, *options], cwd=ROOT, check=True, timeout=800)
    return json.loads(file.read_text())["items"]


@pytest.mark.slow
@pytest.mark.timeout(840)
@pytest.mark.parametrize("groups", GROUPS)
def test_a_dry_run_walks_through_all_of_it(groups, tmp_path):
    items = dry_run(["--only", f"^({groups.replace(' ', '|')})[.]"], tmp_path)
    assert {name.partition(".")[0] for name in items} == set(groups.split())
    check(items)


@pytest.mark.slow
def test_a_dry_run_starts_each_process_anew_where_it_is_asked_to(tmp_path):
    items = dry_run(["--fresh", "--only", "speed.resnet50_bf16.fusion"], tmp_path)
    assert list(items) == ["speed.resnet50_bf16.fusion"]
    check(items)


def check(items):
    assert [name for name, result in items.items() if results.has_errors(result)] == []
    unmet = [row for name, result in items.items() for row in result["rows"] if row.get("is_met") is False]
    assert unmet == []


def test_the_dry_runs_leave_no_item_out():
    walked = {item.name.partition(".")[0] for item in agenda.ITEMS if not item.needs_cuda}
    assert walked == set(" ".join(GROUPS).split())
