"""What is alive, what of it grows, and LeakSearch in plain PyTorch: when it looks, what it takes for a leak."""

import gc
import math
import platform
import random
import sys
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_vram.memory import leaks
from lightning_vram.memory.leaks import NOBODY, LeakSearch, LiveBytes, Program, steady_bytes
from lightning_vram.memory.units import KIB, MIB

HOST = torch.device("cpu")
is_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


@is_glibc
@pytest.mark.parametrize("size", [64 * KIB, 8 * MIB])
def test_counts_what_is_alive(size):
    counter = LiveBytes(HOST)
    before = counter.read()["cpu"]
    tensor = torch.empty(size, dtype=torch.uint8)
    there = counter.read()["cpu"]
    del tensor
    assert there - before == pytest.approx(size, abs=8 * KIB)
    assert counter.read()["cpu"] - before == pytest.approx(0, abs=8 * KIB)


def steady(counts, length=20):
    return steady_bytes([*deque(counts, maxlen=length)], KIB)


def test_a_steady_rise_is_told_by_its_slope():
    for length in (5, 6, 20):
        assert steady((10**9 + 4 * KIB * step for step in range(20)), length) == 4 * KIB


@pytest.mark.parametrize(
    "counts",
    [
        [5 * 10**6] * 40,
        [10**6 * (step % 4) for step in range(40)],
        [10**9] + [10**6] * 39,
        [*range(0, 10**6, 10**5), *[10**6] * 30],
        [10**6] * 30 + [2 * 10**6] * 10,
        list(range(10**6, 0, -25_000)),
    ],
    ids=["flat", "windows", "a fall", "a cache that filled up", "one leap", "falling"],
)
def test_other_courses_are_none(counts):
    assert steady(counts) == 0


def test_batches_of_different_lengths_seldom_look_like_growth():
    source = random.Random(0)
    counts = [10**9 + source.randrange(10**7) for _ in range(2000)]
    found = sum(steady(counts[start : start + 20]) > 0 for start in range(1980))
    assert found <= 2000 / 16  # by chance one of 24: each costs one look


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


@pytest.mark.slow
def test_a_graph_is_told_at_once():
    training = Training()
    losses = training.losses = []

    def step():
        losses.append(training.net(torch.ones(128, 8)).exp().sum())
        training.num_kept += 1

    (leak,) = training.run(20, step)
    assert [(holder.path, holder.has_graph) for holder in leak.holders] == [("training.losses", True)]


def test_few_steps_are_followed_however_long_it_grows():
    training = Training()
    training.run(400)
    assert sum(training.modes) <= 4
    assert len(training.modes) == 400


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


@pytest.mark.slow
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
