"""Threads are bound for the time of a fit, whatever ends it, and only where a user lets them."""

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from support.helpers import ForkingOffload, fail_in
from support.offload_nets import Fused

from lightning_vram.core.processes import NumaBinding
from lightning_vram.private_names.torch import bind_threads
from lightning_vram.strategies.fsdp_offload import strategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """One whose second node has the device."""
    noted = SimpleNamespace(before=os.sched_getaffinity(0), asked=[])

    def bind(device: Any, local_world_size: int, *, idle_nodes_ok: bool) -> NumaBinding:
        noted.asked.append((str(device), local_world_size, idle_nodes_ok))
        bind_threads(logical_cpu_indices={max(noted.before)})
        return NumaBinding(frozenset(noted.before), 1, "Rank 0 is on node 1.")

    monkeypatch.setattr(strategy, "bind_to_node_of", bind)
    return noted


class Looking(Fused):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        threads = {int(name): os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")}
        self.seen.append((self.trainer.strategy._num_threads, *threads.values()))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("wanted", "idle_nodes_ok"), [(None, False), (True, True)])
def test_threads_are_bound_during_the_fit(machine, make_trainer, caplog, wanted, idle_nodes_ok):
    model = Looking()
    with caplog.at_level(logging.INFO):
        make_trainer(strategy=ForkingOffload(bind_to_numa_node=wanted), max_steps=1).fit(model)
    assert machine.asked == [("cpu", 1, idle_nodes_ok)]
    (num_threads, *cores), *_ = model.seen
    assert num_threads == 1
    assert set(map(tuple, cores)) == {(max(machine.before),)}
    assert [record.message for record in caplog.records].count("Rank 0 is on node 1.") == 1
    assert os.sched_getaffinity(0) == machine.before


@pytest.mark.parametrize("hook", ["configure_optimizers", "training_step"])
def test_threads_are_let_go_after_an_error(machine, make_trainer, hook):
    fail_in(Looking(), hook, make_trainer(strategy=ForkingOffload(), max_steps=1))
    assert machine.asked
    assert os.sched_getaffinity(0) == machine.before


@pytest.mark.parametrize(
    ("arguments", "method"), [({"bind_to_numa_node": False}, "fit"), ({"offload": "none"}, "fit"), ({}, "validate")]
)
def test_threads_are_left_alone(machine, make_trainer, arguments, method):
    getattr(make_trainer(strategy=ForkingOffload(**arguments), max_steps=1), method)(Fused())
    assert machine.asked == []
