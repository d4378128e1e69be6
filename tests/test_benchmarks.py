"""The frame of the benchmarks works: a small run writes what is promised."""

import gc
import json
import sys
from datetime import date

import pytest
import torch

from lightning_vram.core.processes import leave_group
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks.cases import QUICK_WORKLOADS
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.ours import find_way
from tests.benchmarks.suites import memory
from tests.benchmarks.ways import PLAIN, Way

CPU = torch.device("cpu")
CHECKPOINTED, MATMULS = "ActivationCheckpointing()", 'ActivationCheckpointing(save="matmuls")'


def run_suite(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, options)])
    with pytest.raises(SystemExit) as end:
        benchmarks.main()
    return end.value.code


@pytest.fixture
def alone():
    """No process group is left for those that come later."""
    yield
    leave_group()
    gc.collect()


@pytest.fixture(scope="module")
def quick_memory():
    """Rows of the memory suite's small workloads."""
    return list(memory.measure(Options(CPU, is_quick=True, settings=memory.SETTINGS)))


@pytest.mark.slow
def test_tracked_bytes_are_those_held_for_this_version_of_torch(quick_memory):
    held = memory.read_golden().get(memory.minor_version())
    if held is None:
        pytest.skip(f"golden_bytes.json holds nothing for torch {memory.minor_version()}: {memory.RENEWAL}")
    found = memory.golden_of(quick_memory)
    assert found == held, f"A change is a CHANGELOG line or a bug. What is meant is held by: {memory.RENEWAL}"


@pytest.mark.slow
def test_each_technique_keeps_less_than_plain(quick_memory):
    rows = {row["variant"]: row for row in quick_memory if "ResNet" in row["workload"]}
    assert list(rows) == ["plain", "plain, in a Trainer", *(way.name for way in memory.WAYS)]
    plain = rows["plain"]["saved_for_backward_bytes"]
    kept = {name: row["saved_for_backward_bytes"] / plain for name, row in rows.items()}
    assert kept[CHECKPOINTED] <= 0.45
    assert kept["InPlaceFusion()"] <= 0.6
    assert kept[CHECKPOINTED] < kept[MATMULS] < 1
    assert kept['ActivationOffload("64KiB")'] <= 0.2
    assert kept[f'{CHECKPOINTED}, ActivationOffload("64KiB")'] <= kept[CHECKPOINTED]
    for share in (0.75, 0.5):
        row = rows[f"ActivationCheckpointing(budget=...), {share} of plain"]
        assert row["activations_peak_bytes"] <= share * rows["plain"]["activations_peak_bytes"]


@pytest.mark.slow
def test_a_suite_writes_device_versions_options_and_both_axes(monkeypatch, tmp_path, capsys):
    path = tmp_path / "sub" / "result.json"
    options = ["--only", "DigitsResNet", "--ways", "InPlaceFusion()", "--repeats", "1", "--steps", "1"]
    assert run_suite(monkeypatch, "--suite", "speed", "--quick", *options, "-o", path) == 0
    result = json.loads(path.read_text())
    assert {"device", "processor", "torch", "lightning", "driver"} <= set(result["machine"])
    assert date.fromisoformat(result["date"])
    assert result["suite"] == "speed"
    assert result["options"]["speed"] == {"repeats": 1, "steps": 1}
    plain, ours, _ = result["rows"]
    assert (plain["variant"], plain["by"], ours["by"]) == ("plain", "plain", "ours")
    assert ours["seconds_of_first"] == ours["seconds_per_step"] / plain["seconds_per_step"]
    assert ours["seconds_of_first_low"] <= ours["seconds_of_first"] <= ours["seconds_of_first_high"]
    assert ours["peak_of_first"] == ours["peak_bytes"] / plain["peak_bytes"] < 1
    assert "InPlace" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ActivationOffload offloads")
@pytest.mark.parametrize(
    "suite", ["optimizers", "batches", "precision", "strategies", "plan", "early_release", "leak_detector", "errors"]
)
def test_a_quick_run_ends_without_an_error(suite, monkeypatch, tmp_path, alone):
    only = [] if suite in ("leak_detector", "errors") else ["--only", "Digits"]
    assert run_suite(monkeypatch, "--suite", suite, "--quick", *only, "-o", tmp_path) == 0
    rows = json.loads((tmp_path / f"{suite}_cpu.json").read_text())["rows"]
    assert {"workload", "variant", "by"} <= set.intersection(*(set(row) for row in rows))
    assert {row.get("error", "needs a GPU")[:11] for row in rows} == {"needs a GPU"}


def test_a_suite_that_is_not_there_is_refused(monkeypatch, capsys):
    assert run_suite(monkeypatch, "--suite", "memroy") == 2
    assert "--suite memroy: use all, memory, speed" in capsys.readouterr().err


def test_wrong_arguments_are_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    assert run_suite(monkeypatch, "--suite", "speed", "--repeats", "0") == 2
    assert "--repeats must be at least 1, got 0." in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run_suite(monkeypatch, "--suite", "speed", "-o", tmp_path / "file" / "a.json") == 2
    assert "file/a.json: File exists." in capsys.readouterr().err


def fail(model):
    raise RuntimeError("no such kernel\nand more")


def test_a_way_that_cannot_run_is_a_row_and_others_go_on():
    ways = [
        PLAIN,
        Way("raises", "ours", fail),
        Way("missing", "torchao", why_not=lambda device: "not installed: pip install torchao"),
        find_way(CHECKPOINTED),
    ]
    plain, raises, missing, ours = measure_ways(QUICK_WORKLOADS[1], ways, CPU, repeats=1, steps=1)
    assert raises["error"] == "RuntimeError: no such kernel and more"
    assert missing["error"] == "not installed: pip install torchao"
    assert not {"peak_bytes", "seconds_per_step"} & (raises.keys() | missing.keys())
    assert ours["seconds_of_first"] == ours["seconds_per_step"] / plain["seconds_per_step"]
