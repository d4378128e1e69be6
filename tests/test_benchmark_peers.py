"""Others' ways to train, beside which ours is measured: they run where they can, and say why where they cannot."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from lightning_vram.core.processes import leave_group
from tests.benchmarks.cases import WORKLOADS, Workload
from tests.benchmarks.peers import PEERS
from tests.benchmarks.peers.installed import needs
from tests.benchmarks.peers.lightning_alone import Finder
from tests.benchmarks.sizes import grow_batch, largest_that
from tests.benchmarks.suites import biggest
from tests.benchmarks.ways import Way
from tests.benchmarks.whole_runs import fit

CPU, GPU = torch.device("cpu"), torch.device("cuda")
RESNET = WORKLOADS[1]
WAYS = {way.name: way for several in PEERS.values() for way in several}
HERE = [name for name, way in WAYS.items() if way.by in ("PyTorch", "Lightning") and way.why_not(CPU) is None]


def losses_of(way: Way, num_steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = RESNET.make_model(), RESNET.make_batch()
    way.change(model)
    optimizer = way.make_optimizer(model.parameters())
    losses = []
    for _ in range(num_steps):
        loss = RESNET.compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, list(model.parameters())


def test_every_library_that_is_named_has_ways():
    assert {way.by for way in WAYS.values()} == {
        *("PyTorch", "Lightning", "torchao", "bitsandbytes", "torchtune", "Accelerate"),
        *("Composer", "DeepSpeed", "inplace_abn", "Liger"),
    }


def test_the_device_is_named_before_what_is_not_installed():
    why_not = needs("no_such_library", "no-such-library")
    assert why_not(CPU) == "needs a GPU"
    assert why_not(GPU) == "not installed: pip install no-such-library"
    assert needs("no_such_library", "no-such-library", devices=())(CPU) == why_not(GPU)


def test_a_library_that_does_not_import_says_how(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text(f"raise ImportError('no name x\\nin {'y' * 200}')\n")
    monkeypatch.syspath_prepend(tmp_path)
    why = needs("broken_library", "broken", devices=())(CPU)
    assert why.startswith(f"does not import with torch {torch.__version__}: ImportError: no name x in yyy")
    assert why.endswith("...")
    assert len(why) == 160


def test_every_reason_is_one_short_line():
    for device in (CPU, GPU):
        for way in WAYS.values():
            why = way.why_not(device) or "fine"
            assert "\n" not in why
            assert len(why) <= 160


@pytest.mark.parametrize("name", ["torch.utils.checkpoint", "torch.utils.checkpoint, selective"])
def test_what_pytorch_recomputes_is_the_plain_run(name):
    plain, peer = losses_of(biggest.PLAIN), losses_of(WAYS[name])
    assert peer[0] == plain[0]
    assert all(map(torch.equal, peer[1], plain[1]))


@pytest.mark.parametrize("name", [name for name in HERE if WAYS[name].make_trainer_options is not None])
@pytest.mark.slow
@pytest.mark.distributed
def test_lightning_alone_trains(name):
    options = WAYS[name].make_trainer_options(RESNET)
    try:
        fit(RESNET, options.pop("callbacks", []), 2, CPU, **options)
    finally:
        leave_group()
        gc.collect()


@pytest.mark.slow
def test_lightnings_finder_stops_where_memory_runs_out(tmp_path):
    def compute_loss(model, batch):
        if len(batch[0]) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return RESNET.compute_loss(model, batch)

    finder = Finder(replace(RESNET, compute_loss=compute_loss))
    fit(finder._workload, [finder], 2, CPU, default_root_dir=tmp_path)
    assert finder.optimal_batch_size == 19  # 20 by bisection, less its margin of 5 %


@pytest.mark.parametrize("start", [1, 38, 1000])
@pytest.mark.parametrize("limit", [0, 1, 37])
def test_the_largest_size_is_exact_wherever_it_begins(start, limit):
    asked = []

    def trains(size):
        asked.append(size)
        return size <= limit

    assert largest_that(trains, start) == limit
    assert min(asked) >= 1
    assert len(asked) <= 22


SIDE = 64
WEIGHT_BYTES = 4 * SIDE * SIDE


def linear(size: int = 1) -> Workload:
    return Workload(
        "linear",
        partial(nn.Linear, SIDE, SIDE, bias=False),
        lambda: (torch.randn(size, SIDE),),
        lambda model, batch: model(batch[0]).sum(),
    )


def test_the_largest_batch_of_a_linear_layer_is_the_one_worked_out():
    # Most is alive when the weight has its gradient: both, the batch, and 4 bytes each of the loss and its gradient.
    way = replace(biggest.PLAIN, make_optimizer=partial(torch.optim.SGD, lr=0.1))
    growth = grow_batch(linear())
    row_bytes = 4 * SIDE
    most = 2 * WEIGHT_BYTES + 40 * row_bytes + 8
    assert biggest.train(growth.make(40), way, CPU) == {"peak_bytes": most}
    for budget, largest in ((most, 40), (most + row_bytes - 1, 40), (most - 1, 39)):
        row = biggest.Search(growth, way, CPU, budget).run(1)
        assert row["largest"] == largest
        assert row["peak_bytes"] <= budget


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
