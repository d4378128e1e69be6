"""The frame of the benchmarks works: a small run writes what is promised."""

import gc
import json
import sys

import pytest
import torch

from lightning_vram.core.processes.clean_exit import leave_group
from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks import compression_errors, fsdp_offload, host_adamw, mixed_precision, offload_overlap
from tests.benchmarks.cases import WORKLOADS
from tests.benchmarks.measure import Run, sum_up_events
from tests.benchmarks.recomputation import Chain, measure_overhead, measure_shares
from tests.benchmarks.variants import GPU_PEERS, VARIANTS


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["memory", "speed"])
def test_a_suite_writes_device_versions_and_rows(suite, monkeypatch, tmp_path, capsys):
    path = tmp_path / "sub" / "result.json"
    options = ["--suite", suite, "-o", str(path), "--only", "DigitsResNet (2", "--repeats", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options])
    benchmarks.main()
    result = json.loads(path.read_text())
    assert {"device", "torch", "lightning", "driver"} <= set(result["machine"])
    assert [row["variant"] for row in result["rows"]] == list(VARIANTS)
    assert "InPlace" in capsys.readouterr().out
    if suite == "memory":
        rows = {row["variant"]: row for row in result["rows"]}
        kept = {
            name: row["saved_for_backward_bytes"] / rows["plain"]["saved_for_backward_bytes"]
            for name, row in rows.items()
        }
        assert kept["checkpointed"] <= 0.45
        assert kept["InPlaceFusion"] <= 0.6
        assert kept["checkpointed"] < kept["checkpointed, matmuls kept"] < 1
        assert kept["offloaded"] <= 0.2
        assert kept["checkpointed, offloaded"] <= kept["checkpointed"]
        for share in (0.75, 0.5):
            peaks = (
                rows["plain"]["activations_peak_bytes"],
                rows[f"checkpointed, budget {share}"]["activations_peak_bytes"],
            )
            assert peaks[1] <= share * peaks[0]


@pytest.mark.parametrize("variant", ["checkpointed", *GPU_PEERS])
def test_a_step_trains(variant, monkeypatch):
    if variant == "save_on_cpu":  # pins memory
        monkeypatch.setattr(
            "tests.benchmarks.variants.save_on_cpu", lambda pin_memory: torch.autograd.graph.save_on_cpu()
        )
    run = Run(WORKLOADS[1], variant, torch.device("cpu"))
    before = [p.clone() for p in run.model.parameters()]
    run.step()
    assert not all(torch.equal(one, other) for one, other in zip(run.model.parameters(), before, strict=True))


def test_shares_and_overheads_of_recomputation_are_measured():
    row = measure_shares("mobilenetv2", None)
    assert row["kept_share"] == row["kept_bytes"] / row["plain_kept_bytes"] <= 0.36
    row = measure_overhead("chain", Chain(2), torch.randn(4, 8), num_turns=1)
    assert row["num_operators"] >= 2 * 5
    assert {"recomputation, forward us per operator", "empty mode, backward us per operator"} <= row.keys()


def test_what_compression_does_to_the_gradient_is_measured():
    share, cosine = compression_errors.measure("DigitsResNet", "int8")
    assert share <= 0.3
    assert 0.999 < cosine < 1
    assert compression_errors.measure("DigitsResNet", None)[0] <= 0.97


@pytest.mark.slow
def test_the_precision_plugin_is_measured_on_shapes_of_gpu_size():
    rows = {row["variant"]: row for row in mixed_precision.measure_fake(num_layers=4)}
    assert rows["bf16, recast"]["peak_of_lightning"] < 0.95
    assert rows["bf16, recast, norms"]["peak_of_lightning"] <= 0.9
    peaks = [row["peak_bytes"] for name, row in rows.items() if name.startswith("bf16+")]
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
def test_the_precision_plugin_is_measured_in_a_trainer():
    rows = mixed_precision.measure(WORKLOADS[1], repeats=1)
    assert rows[0]["seconds_of_lightning"] == 1
    assert rows[1]["peak_bytes"] == rows[0]["peak_bytes"]
    assert rows[2]["peak_bytes"] < rows[0]["peak_bytes"]


@pytest.fixture
def alone():
    """No process group is left for those that come later."""
    yield
    leave_group()
    gc.collect()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", list(offload_overlap.OPTIMIZERS))
def test_the_time_that_a_step_hides_is_measured(optimizer, alone):
    shape = offload_overlap.Shape(num_blocks=2, width=8, num_threads=1, num_steps=2, optimizer=optimizer)
    row = offload_overlap.measure_case(shape, offload_overlap.Case("both", 1.5, accumulate=2, clip=1.0), repeats=2)
    bound = max(row["compute_seconds"], row["step_seconds"])
    assert row["beside_of_bound"] == row["beside_seconds"] / bound > 0
    assert all(len(row[f"all_{name}_seconds"]) == 2 for name in ("step", "compute", "waiting", "beside"))


@pytest.mark.distributed
def test_the_rate_of_a_step_on_the_host_is_measured(alone):
    with host_adamw.process_group():
        rows = list(host_adamw.measure("two blocks", lambda: host_adamw.make_blocks(2, width=8), 1, repeats=1))
    by_name = {row["variant"]: row for row in rows}
    assert by_name["add_"]["rate_of_add"] == 1
    num_parameters = 2 * (12 * 8 * 8 + 13 * 8)
    ours = by_name["OffloadedAdamW"]
    assert ours["gb_per_second"] * ours["seconds"] * 1e9 == pytest.approx(28 * num_parameters)


@pytest.mark.slow
@pytest.mark.distributed
def test_memory_and_speed_of_the_strategy_are_measured(alone):
    names = [name for name, variant in fsdp_offload.VARIANTS.items() if not variant.needs_gpu]
    rows = {row["variant"]: row for row in fsdp_offload.measure_tiny(names, 1, is_profiled=True)}
    assert list(rows) == names
    assert {row["fits"] for row in rows.values()} == {"yes"}
    ours, plain = rows["fsdp_offload, params"], rows["plain"]
    assert ours["speed_of_plain"] == ours["tokens_per_second"] / plain["tokens_per_second"]
    assert ours["exposed_seconds"] == ours["seconds_per_step"] - plain["computing_seconds"]


def test_what_runs_beside_what_is_summed_up():
    events = [
        ("gemm", (0, 10)),
        ("gemm", (5, 20)),
        ("Memcpy HtoD (Pinned -> Device)", (15, 30)),
        ("Memcpy DtoH (Device -> Pinned)", (28, 32)),
        ("Memcpy DtoD (Device -> Device)", (40, 50)),
    ]
    sums = sum_up_events(events)
    assert sums == {"computing_seconds": 20e-9, "copying_seconds": 17e-9, "copying_beside_seconds": 5e-9}


def test_a_run_that_does_not_fit_is_a_row(monkeypatch):
    class Hungry(fsdp_offload.LitGPT):
        def training_step(self, batch):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(fsdp_offload, "LitGPT", Hungry)
    rows = fsdp_offload.measure_tiny(["plain"], 1)
    assert rows == [{"shape": "tiny", "variant": "plain", "fits": "out of memory"}]
