"""LeakSearch in plain PyTorch: when it looks, what it takes for a leak, and that it leaves nothing behind."""

import gc
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_vram.memory import leaks
from lightning_vram.memory.leaks import NOBODY, LeakSearch, Program

SAVED_COPY_BYTES = 4096
PATIENCE = 5


@pytest.fixture(autouse=True)
def few_globals(monkeypatch):
    """What no name leads to is looked for in all modules, which takes seconds: here are none but this one."""
    modules = {__name__: sys.modules[__name__]}
    monkeypatch.setattr(leaks, "sys", SimpleNamespace(modules=modules, _getframe=sys._getframe))


class Training:
    """Steps that keep 4 KiB each, and a count that says so."""

    def __init__(self, room: float = math.inf) -> None:
        self.net = nn.Linear(8, 8)
        self.kept: list[torch.Tensor] = []
        self.num_kept = 0
        self.modes = []
        program = Program(
            count=lambda: {"cpu": SAVED_COPY_BYTES * self.num_kept},
            held=self.net.parameters,
            names=lambda: {"training": self},
            follows_operators=True,
            room=lambda: room,
        )
        self.search = LeakSearch(program, PATIENCE, 1024, set())

    def keep(self):
        self.kept.append(torch.zeros(1024))
        self.num_kept += 1

    def run(self, num_steps, step=None, num_steps_left=10.0):
        found = []
        for _ in range(num_steps):
            with self.search.around_step():
                self.modes.append(len(_get_current_dispatch_mode_stack()))
                (step or self.keep)()
            found.append(self.search.end_step(num_steps_left))
        return [leak for leak in found if leak is not None]


def test_tensors_are_told_once_they_outlive_the_epoch():
    training = Training()
    assert training.run(30) == []  # they may be for its end
    training.search.end_epoch()
    (leak,) = training.run(30)
    assert (leak.bytes_per_step, leak.tensor_bytes) == (SAVED_COPY_BYTES, SAVED_COPY_BYTES)
    assert [holder.path for holder in leak.holders] == ["training.kept"]
    assert leak.sites[0][0].endswith("in keep")


def test_they_are_told_before_memory_runs_out():
    training = Training(room=10.5 * SAVED_COPY_BYTES)
    assert training.run(30, num_steps_left=10.0) == []
    assert len(training.run(30, num_steps_left=11.0)) == 1


def test_a_graph_is_told_at_once():
    training = Training()
    losses = training.losses = []

    def step():
        losses.append(training.net(torch.ones(128, 8)).exp().sum())
        training.num_kept += 1

    (leak,) = training.run(20, step)
    assert [(holder.path, holder.has_graph) for holder in leak.holders] == [("training.losses", True)]


@pytest.mark.parametrize("has_tensors", [True, False])
def test_what_only_a_cycle_keeps_and_growth_without_tensors_are_no_leak(has_tensors):
    training = Training()

    def step():
        if has_tensors:
            cycle = [torch.zeros(1024)]
            cycle.append(cycle)
        training.num_kept += 1  # lists of numbers, say

    gc.disable()
    try:
        for _ in range(2):
            training.search.end_epoch()
            assert training.run(20, step) == []
    finally:
        gc.enable()


def test_what_nobody_can_see_is_told_by_its_origin():
    training = Training()
    hidden = []

    def step():
        hidden.append(torch.utils.dlpack.to_dlpack(torch.zeros(1024)))  # a capsule, not a tensor
        training.num_kept += 1

    training.run(10, step)
    training.search.end_epoch()
    (leak,) = training.run(30, step)
    assert leak.holders == (NOBODY,)
    assert "\n  held by no Python object\n  allocated in " in str(leak)


def test_a_mode_ends_with_its_step_whatever_happens():
    training = Training()

    def fail():
        raise RuntimeError("in the step")

    for _ in range(3 * PATIENCE):
        with pytest.raises(RuntimeError), training.search.around_step():
            fail()
        training.num_kept += 1
        training.search.end_step(10.0)
        assert _get_current_dispatch_mode_stack() == []
