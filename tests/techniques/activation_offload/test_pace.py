"""On a device whose bus takes as long as it is told to, what cannot travel in time stays, by numbers worked out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.timed_machine import TimedMachine
from torch import Tensor

from lightning_vram.techniques.activation_offload.places import OffloadMeasures
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading, check_max_slowdown

SIDE = 32
MATRIX = SIDE * SIDE * 4
NUM_LAYERS = 32  # each takes a second, and two in the backward, and saves a matrix
COMPUTE_SECONDS = 3.0 * NUM_LAYERS

MEASURES = OffloadMeasures(
    to_host_bytes_per_second=10.0,
    to_device_bytes_per_second=20.0,
    forward_seconds=4.0,
    backward_seconds=6.0,
    forward_wait_seconds=3.0,
    backward_wait_seconds=2.0,
    saved_bytes=1000,
    travelling_share=1.0,
    copies_run_beside=True,
)


@pytest.mark.parametrize(
    ("changes", "max_slowdown", "most_bytes"),
    [
        ({}, 1.0, 40),  # what goes out in 4 seconds
        ({}, 1.5, 90),  # in 9 seconds, and comes back in 4.5
        ({}, 4.0, 266),  # 15 bytes take 1.5 and 0.75 seconds: all of 40 seconds
        ({"to_device_bytes_per_second": 5.0}, 1.0, 30),  # what comes back in 6 seconds
        ({"saved_bytes": 30}, 1.0, 30),
        ({"copies_run_beside": False}, 1.0, 0),
        ({"copies_run_beside": False}, 1.3, 20),  # 2 seconds out and 1 back
        ({"travelling_share": 0.5}, 1.0, 80),
        ({}, float("inf"), 1000),
    ],
)
def test_what_can_travel(changes: dict[str, Any], max_slowdown: float, most_bytes: int) -> None:
    assert replace(MEASURES, **changes).most_bytes(max_slowdown) == most_bytes


def test_what_was_carried_while_the_computation_waited_too_long() -> None:
    assert MEASURES.excess_seconds(1.3) == pytest.approx(2.0)
    assert MEASURES.excess_bytes(1.3) == 28  # of 30 and 40 bytes in 5 seconds
    assert MEASURES.excess_bytes(1.5) == 0


def run(machine: TimedMachine, x: Tensor) -> Tensor:
    for _ in range(NUM_LAYERS):
        x = machine.layer(x, 1.0)
    return x.sum()


def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(SIDE, SIDE).requires_grad_()


class Fit:
    """Steps, the seconds each took, and what travelled in each. Its gradients are those of the plain run."""

    def __init__(self, machine: TimedMachine, offloading: ActivationOffloading) -> None:
        self.machine, self.offloading, self.x = machine, offloading, weight()
        (self.plain,) = torch.autograd.grad(run(machine, self.x), self.x)
        self.slowdowns: list[float] = []
        self.num_sent: list[int] = []

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            start = self.machine.compute.seconds
            with self.offloading:
                loss = run(self.machine, self.x)
            (gradient,) = torch.autograd.grad(loss, self.x)
            assert torch.equal(gradient, self.plain)
            self.slowdowns.append((self.machine.compute.seconds - start) / COMPUTE_SECONDS)
            self.num_sent.append(self.offloading.report.num_offloaded)


def fit(matrices_per_second: float, num_steps: int, back: float | None = None, **arguments: Any) -> Fit:
    machine = TimedMachine(matrices_per_second * MATRIX, (back or matrices_per_second) * MATRIX)
    with machine.installed():
        fitted = Fit(machine, machine.make_offloading(**arguments))
        fitted.steps(num_steps)
    return fitted


@pytest.mark.parametrize(
    ("matrices_per_second", "max_slowdown", "num_sent"),
    [(0.5, 1.0, 16), (0.25, 1.0, 8), (0.1, 1.0, 3), (0.01, 1.0, 0), (0.5, 1.05, 18), (0.25, 1.05, 9)],
)
def test_a_slow_bus_gets_what_it_carries(matrices_per_second: float, max_slowdown: float, num_sent: int) -> None:
    """``max_slowdown`` 1.05 gives it 0.05 * 94 seconds more: backwards count up to what is asked for last."""
    fitted = fit(matrices_per_second, 10, max_slowdown=max_slowdown)
    assert fitted.num_sent == [NUM_LAYERS, NUM_LAYERS - 2, NUM_LAYERS - 2] + [num_sent] * 7  # two are the window
    assert all(slowdown > 1.25 for slowdown in fitted.slowdowns[:3])
    assert all(slowdown <= max_slowdown for slowdown in fitted.slowdowns[3:])


def test_what_was_found_can_be_read() -> None:
    fitted = fit(0.5, 3, back=0.75, max_slowdown=1.5)
    assert fitted.offloading.measures is None
    with fitted.machine.installed():
        fitted.steps(1)
    measures = fitted.offloading.measures
    assert measures is not None
    assert measures.to_host_bytes_per_second == pytest.approx(0.5 * MATRIX)
    assert measures.to_device_bytes_per_second == pytest.approx(0.75 * MATRIX)
    assert measures.forward_seconds == pytest.approx(NUM_LAYERS)
    assert measures.backward_seconds == pytest.approx(2 * (NUM_LAYERS - 1))
    assert measures.wait_seconds == pytest.approx((fitted.slowdowns[2] - 1) * COMPUTE_SECONDS)
    assert measures.saved_bytes == NUM_LAYERS * MATRIX


@pytest.mark.parametrize(("matrices_per_second", "max_slowdown"), [(2, 1.0), (1, 1.0), (0.5, 1.5), (0.1, float("inf"))])
def test_a_bus_that_is_fast_enough_gets_everything(matrices_per_second: float, max_slowdown: float) -> None:
    fitted = fit(matrices_per_second, 8, max_slowdown=max_slowdown)
    assert fitted.num_sent == [NUM_LAYERS] + [NUM_LAYERS - 2] * 7
    assert fitted.offloading.most_bytes is None
    assert fitted.offloading.measures is not None


def test_a_limit_of_the_user_is_only_lowered() -> None:
    assert set(fit(0.5, 8, max_slowdown=1.0, most_bytes=4 * MATRIX).num_sent) == {4}
    assert fit(0.5, 8, max_slowdown=1.0, most_bytes=25 * MATRIX).num_sent[-5:] == [16] * 5


def test_half_of_the_bytes_on_the_bus_are_twice_the_tensors() -> None:
    machine = TimedMachine(0.25 * MATRIX, 0.25 * MATRIX)
    offloading = machine.make_offloading(max_slowdown=1.0, compress="bf16")
    with machine.installed():
        x = weight()
        for _ in range(5):
            with offloading:
                loss = run(machine, x)
            loss.backward()
    assert offloading.report.num_offloaded == 16


def test_a_limit_that_still_has_the_computation_wait_is_lowered() -> None:
    """The backward begins to fetch when half of what stayed is used up: too late for a bus this slow."""
    fitted = fit(0.5, 12, back=0.1, max_slowdown=1.0)
    limits = fitted.num_sent[3:]
    assert limits == sorted(limits, reverse=True)
    assert 0 < limits[-1] == limits[-2] < limits[0]
    assert fitted.slowdowns[-1] <= 1.01


def test_a_bus_that_becomes_slow_is_noticed_a_hundred_steps_later() -> None:
    fitted = fit(1, 6, max_slowdown=1.0)
    fitted.machine.to_host /= 4
    with fitted.machine.installed():
        fitted.steps(104)
    assert fitted.num_sent[50:60] == [30] * 10
    assert fitted.num_sent[-1] == 8
    assert fitted.slowdowns[-1] == 1.0


def test_later_steps_wait_for_no_event_of_a_measurement() -> None:
    fitted = fit(0.5, 6, max_slowdown=1.0)  # two pairs of steps
    assert fitted.machine.num_synchronized > 0
    fitted.machine.num_synchronized = 0
    with fitted.machine.installed():
        fitted.steps(90)
    assert fitted.machine.num_synchronized == 0


def test_nothing_is_measured_without_a_slowdown() -> None:
    fitted = fit(0.5, 5)
    assert fitted.machine.num_synchronized == 0
    assert fitted.offloading.measures is None
    assert fitted.num_sent[-1] == NUM_LAYERS - 2


def test_a_step_without_a_backward_says_nothing() -> None:
    machine = TimedMachine(0.5 * MATRIX, 0.5 * MATRIX)
    offloading = machine.make_offloading(max_slowdown=1.0)
    with machine.installed():
        for _ in range(6):
            with offloading:
                run(machine, weight())
    assert offloading.measures is None
    assert offloading.most_bytes is None


def test_on_the_host_the_computation_stands_still_for_each_copy() -> None:
    x = weight()
    (expected,) = torch.autograd.grad(x.sin().sin().sin().sum(), x)
    offloading = ActivationOffloading(min_offload_bytes=1, max_slowdown=1.0)
    for _ in range(5):
        with offloading:
            loss = x.sin().sin().sin().sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    assert offloading.measures is not None
    assert not offloading.measures.copies_run_beside
    assert offloading.most_bytes == 0


@pytest.mark.parametrize(
    ("value", "disk_path", "kind", "message"),
    [
        ("fast", None, TypeError, "max_slowdown must be a number or None, got 'fast' of type str."),
        (True, None, TypeError, "max_slowdown must be a number or None, got True of type bool."),
        (0.9, None, ValueError, "max_slowdown must be at least 1, got 0.9."),
        (float("nan"), None, ValueError, "max_slowdown must be at least 1, got nan."),
        (1.05, "/tmp", ValueError, "max_slowdown is for host memory: with disk_path, set most_bytes."),
    ],
)
def test_what_is_no_slowdown_is_refused(value: Any, disk_path: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        check_max_slowdown("max_slowdown", value, disk_path)
    assert str(error.value) == message
