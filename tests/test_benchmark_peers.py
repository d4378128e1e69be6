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
from tests.benchmarks.sizes import grow_batch, largest_that
from tests.benchmarks.suites import biggest
from tests.benchmarks.whole_runs import fit

CPU, GPU = torch.device("cpu"), torch.device("cuda")
RESNET = WORKLOADS[1]
WAYS = {way.name: way for several in PEERS.values() for way in several}
HERE = [name for name, way in WAYS.items() if way.by in ("PyTorch", "Lightning") and way.why_not(CPU) is None]


def test_a_library_that_does_not_import_says_how(tmp_path, monkeypatch):
    (tmp_path / "broken_library.py").write_text(f"raise ImportError('no name x\\nin {'y' * 200}')\n")
    monkeypatch.syspath_prepend(tmp_path)
    why = needs("broken_library", "broken", devices=())(CPU)
    assert why.startswith(f"does not import with torch {torch.__version__}: ImportError: no name x in yyy")
    assert why.endswith("...")
    assert len(why) == 160


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
