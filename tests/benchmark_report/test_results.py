"""Files of results: what is taken, and what is refused in one line."""

import json
import os

import pytest
from support.parts import ROOT
from support.result_files import BIGGEST, MACHINE, SPEED, way, write

from tests.benchmarks.report import read_results
from tests.benchmarks.report.bars import Bar, read_bars
from tests.benchmarks.report.points import front, read_panels
from tests.benchmarks.report.results import machine_differences


def test_a_file_says_device_versions_and_date(tmp_path):
    file = read_results(write(tmp_path / "a.json", SPEED, driver="590.1"))
    assert (file.suite, len(file.rows)) == ("speed", 5)
    assert file.caption == "x86_64, 1 threads, driver 590.1, torch 2.13.0+cpu, file of 2026-11-24"


def test_a_file_without_a_date_is_of_the_day_on_which_it_was_written(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"machine": {}, "rows": [{"what": "x"}]}))
    os.utime(path, (86400, 86400))
    file = read_results(path)
    assert (file.suite, file.caption) == ("a", "device not known, file of 1970-01-02")


def test_all_files_that_are_kept_are_read():
    files = [read_results(path) for path in sorted((ROOT / "tests" / "benchmarks" / "results").glob("*.json"))]
    rows = {file.path.name: len(file.rows) for file in files}
    assert rows["memory_cpu.json"] >= 30
    assert rows["recomputation_cpu.json"] == 18 + 3  # under names of its own, not "rows"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "{path} is not a file of results: it is not JSON."),
        ("[1]", '{path} is not a file of results: those have "machine" and "rows".'),
        ('{"rows": [{}]}', '{path} is not a file of results: those have "machine" and "rows".'),
        ('{"machine": {}}', "{path} has no rows: nothing was measured."),
        ('{"machine": {}, "rows": []}', "{path} has no rows: nothing was measured."),
        ('{"machine": {}, "rows": [{}, 3]}', "{path}, row 2: a row has names and values, got 3."),
        ('{"machine": {}, "rows": [3]}', "{path}, row 1: a row has names and values, got 3."),
        (
            '{"machine": {}, "rows": [{"peak_bytes": "1 GiB"}]}',
            "{path}, row 1: peak_bytes must be a whole number, 0 or more, got '1 GiB'.",
        ),
        (
            '{"machine": {}, "rows": [{"seconds_per_step": NaN}]}',
            "{path}, row 1: seconds_per_step must be a number above 0, got nan.",
        ),
        ('{"machine": {}, "rows": [{"by": 3}]}', "{path}, row 1: by must be text, got 3."),
    ],
)
def test_what_is_no_file_of_results_is_refused(content, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r".") as caught:
        read_results(path)
    assert str(caught.value) == message.replace("{path}", str(path))


def test_a_file_of_bytes_is_refused(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"a\.json is not a file of results: it is not JSON\."):
        read_results(tmp_path / "a.json")


def test_machines_that_differ_are_told_apart(tmp_path):
    one = read_results(write(tmp_path / "a.json", SPEED))
    other = read_results(write(tmp_path / "b.json", SPEED, torch="2.15.0", driver="590.1"))
    assert machine_differences([one, one]) == []
    assert machine_differences([one, other]) == [
        "machines differ in driver: none (a.json); 590.1 (b.json)",
        "machines differ in torch: 2.13.0+cpu (a.json); 2.15.0 (b.json)",
    ]
    assert MACHINE["driver"] is None


def test_points_and_the_front(tmp_path):
    (panel,) = read_panels(read_results(write(tmp_path / "a.json", SPEED)))
    assert (panel.workload, panel.first, panel.first_seconds, panel.is_tracked) == ("GPT", "baseline", 0.5, True)
    assert [(p.name, p.kind, p.peak_bytes >> 20, p.time) for p in panel.points] == [
        ("baseline", "plain", 400, 1.0),
        ("ActivationCheckpointing()", "ours", 100, 1.25),
        ("InPlaceFusion()", "ours", 300, 1.125),
        ("torch.utils.checkpoint (PyTorch)", "peer", 120, 1.5),
    ]
    assert (panel.points[1].low, panel.points[1].high) == (1.2, 1.35)
    assert [point.time for point in front(panel.points)] == [1.0, 1.125, 1.25]


def test_on_a_gpu_its_allocator_is_asked(tmp_path):
    rows = [way("plain", "plain", 400, 1.0, max_memory_allocated_bytes=512 << 20), way("A()", "ours", 100, 1.25)]
    (panel,) = read_panels(read_results(write(tmp_path / "a.json", rows)))
    assert not panel.is_tracked
    assert [point.peak_bytes >> 20 for point in panel.points] == [512]  # the other one cannot stand beside it


def test_where_plain_dies_times_are_seconds(tmp_path):
    rows = [{**way("A()", "ours", 100, 1.5), "seconds_of_first": None}, {**SPEED[4], "variant": "plain", "by": "plain"}]
    (panel,) = read_panels(read_results(write(tmp_path / "a.json", rows)))
    assert (panel.first, panel.points[0].time) == (None, 0.75)


def test_rows_that_do_not_say_by_whom_they_are_have_no_picture(tmp_path):
    file = read_results(write(tmp_path / "a.json", [{"variant": "plain", "peak_bytes": 1, "seconds_per_step": 1}]))
    assert (read_panels(file), read_bars(file)) == ([], [])


def test_bars_of_what_ran_the_best_first(tmp_path):
    file = read_results(write(tmp_path / "a.json", BIGGEST, suite="biggest"))
    assert read_panels(file) == []
    batches, layers = read_bars(file)
    assert (batches.what, batches.budget_bytes, layers.what) == ("batch size", 300 * 2**20, "layers")
    assert batches.bars == [
        Bar("AutoVRAM()", "ours", 18, "18  (4.50x)"),
        Bar("torch.utils.checkpoint (PyTorch)", "peer", 10, "10  (2.50x)"),
        Bar("baseline", "plain", 4, "4"),
    ]
    assert layers.bars == [Bar("AutoVRAM()", "ours", 31, "31"), Bar("baseline", "plain", None, "OOM")]
