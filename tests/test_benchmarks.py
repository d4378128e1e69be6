"""The frame of the benchmarks works: a small run writes what is promised."""

import gc
import json
import sys
from datetime import date

import pytest
import torch

from lightning_vram.core.processes import leave_group
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks.cases import WORKLOADS
from tests.benchmarks.compare import Options
from tests.benchmarks.peers import PEERS
from tests.benchmarks.sizes import grow_batch
from tests.benchmarks.suites import biggest, memory
from tests.benchmarks.whole_runs import fit

CPU = torch.device("cpu")
RESNET = WORKLOADS[1]
WAYS = {way.name: way for several in PEERS.values() for way in several}
HERE = [name for name, way in WAYS.items() if way.by in ("PyTorch", "Lightning") and way.why_not(CPU) is None]
SUITES = ["optimizers", "batches", "precision", "strategies", "plan", "early_release", "nothing"]
SUITES_WITHOUT_MODELS = ["leak_detector", "errors", "host_adamw", "disk_states", "python_price"]
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
@pytest.mark.parametrize("suite", [*SUITES, *SUITES_WITHOUT_MODELS])
def test_a_quick_run_ends_without_an_error(suite, monkeypatch, tmp_path, alone):
    only = ["--only", "Digits"] if suite in SUITES else []
    assert run_suite(monkeypatch, "--suite", suite, "--quick", *only, "-o", tmp_path) == 0
    rows = json.loads((tmp_path / f"{suite}_cpu.json").read_text())["rows"]
    assert {"workload", "variant", "by"} <= set.intersection(*(set(row) for row in rows))
    assert {row.get("error", "needs a GPU")[:11] for row in rows} == {"needs a GPU"}


# --- others' ways to train, beside which ours is measured


@pytest.mark.parametrize("name", [name for name in HERE if WAYS[name].make_trainer_options is not None])
@pytest.mark.slow
@pytest.mark.distributed
def test_lightning_alone_trains(name, alone):
    options = WAYS[name].make_trainer_options(RESNET)
    fit(RESNET, options.pop("callbacks", []), 2, CPU, **options)


@pytest.mark.slow
def test_a_way_has_a_row_with_its_largest_size_or_a_reason():
    growth = grow_batch(RESNET)
    names = ("plain", "torch.utils.checkpoint", "save_on_cpu", "AutoVRAM(budget)")
    ways = [way for way in biggest.ways_for(growth, 20_000_000, has_peers=True) if way.name in names]
    rows = list(biggest.measure_growth(growth, ways, CPU, 20_000_000))
    by_name = {row["variant"]: row for row in rows}
    assert sorted(by_name) == sorted(names)
    for row in rows:
        assert ("error" in row) != ("largest" in row)
        assert row.get("peak_bytes", 0) <= row["budget_bytes"] == 20_000_000
    assert by_name["save_on_cpu"]["error"] == "needs a device beside the host"
    plain, hand, ours = (by_name[name]["largest"] for name in ("plain", "torch.utils.checkpoint", "AutoVRAM(budget)"))
    assert 0 < plain < hand <= ours
