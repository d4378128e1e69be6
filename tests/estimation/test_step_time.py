"""Times of operators by hand, and of steps in the order in which a card would have them."""

from dataclasses import replace

import pytest
import torch

from lightning_vram import ActivationCheckpointing, ActivationOffload
from lightning_vram.core.host.transfers import TO_DEVICE, TO_HOST, copies_noted, note_copy
from lightning_vram.demos import ByteGPT
from lightning_vram.estimation.step_time import StepClock, StepTime
from lightning_vram.estimation.traced_fit import FIRST_STEP, STEP, FitRun, trace_fit
from lightning_vram.memory.estimate.device_spec import DeviceSpec, find_device

META = torch.device("meta")
LAUNCH = 4e-6
CARD = DeviceSpec(
    "measured card",
    memory_bytes=2**30,
    memory_source="measured",
    bandwidth_bytes_per_s=1e9,
    bus_bytes_per_s=1e8,
    flops_per_s={"fp32": 1e9, "bf16": 4e9},
)


def time_of(run, *, card=CARD):
    clock = StepClock(card, META)
    with copies_noted(clock.note_copy), clock:
        run()
    return clock.now


@pytest.mark.parametrize(
    ("run", "seconds"),
    [
        pytest.param(lambda x: x.exp(), 8e-3, id="as slow as its traffic"),  # 1 M numbers read and written
        pytest.param(lambda x: x @ x, 2 * 1000**3 / 1e9, id="as slow as its arithmetic"),
        pytest.param(lambda x: x.view(-1).t(), 0.0, id="a view takes nothing"),
        pytest.param(lambda x: torch.empty_like(x), 0.0, id="memory takes nothing"),
    ],
)
def test_an_operator_takes_the_longer_of_both(run, seconds):
    x = torch.empty(1000, 1000, device=META)
    found = time_of(lambda: run(x))
    assert found.compute == pytest.approx(seconds + LAUNCH * (seconds > 0))
    assert found.seconds == found.compute


def test_products_take_the_rate_of_their_format():
    x = torch.empty(1000, 1000, device=META, dtype=torch.bfloat16)
    assert time_of(lambda: x @ x).compute == pytest.approx(2 * 1000**3 / 4e9 + LAUNCH)


def test_a_makers_figures_are_not_reached():
    x = torch.empty(1000, 1000, device=META)
    told = DeviceSpec("card", memory_bytes=2**30, bandwidth_bytes_per_s=1e9, flops_per_s={"fp32": 1e9})
    assert time_of(lambda: x @ x, card=told).compute == pytest.approx(2 * 1000**3 / 0.6e9 + LAUNCH)
    assert time_of(lambda: x.exp(), card=told).compute == pytest.approx(8e-3 / 0.85 + LAUNCH)


def test_copies_and_the_host_run_beside_the_computation():
    def run():
        torch.empty(1000, 1000, device=META).exp()
        torch.zeros(1000).exp()
        note_copy(TO_HOST, 10**6)
        note_copy(TO_DEVICE, 2 * 10**6)

    found = time_of(run)
    assert (found.to_host, found.to_card) == pytest.approx((0.01, 0.02))
    assert 0 < found.host < found.compute < found.to_card == found.seconds


def test_a_copy_on_the_stream_of_the_kernels_holds_them_up():
    found = time_of(lambda: torch.ones(1000, 1000).to(META))
    assert found.compute == pytest.approx(4e6 / 1e8)


def test_times_are_subtracted_by_what_takes_them():
    assert StepTime(5.0, 4.0, 3.0, 2.0) - StepTime(1.0, 1.0, 1.0, 1.0) == StepTime(4.0, 3.0, 2.0, 1.0)
    backward = StepTime(2.0, 2.0, 2.0, 2.0)
    assert (StepTime(5.0, backward=backward) - StepTime(1.0, backward=StepTime(1.0))).backward == StepTime(1, 2, 2, 2)


def test_a_forward_does_not_hide_what_a_backward_waits_for():
    backward = StepTime(2.0, to_card=5.0)
    time = StepTime(3.0, to_card=5.0, to_host=5.0, backward=backward)
    assert time.seconds == 10.0  # 1 and 2 of kernels, 5 and 5 of copies
    assert replace(time, host=12.0).seconds == 12.0  # the host goes on beside both
    assert replace(time, to_host=0.5).seconds == 6.0
    assert time.computed_slower(4).seconds == 5.0 + 8.0


def test_what_is_in_a_backward_is_counted_there_too():
    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            note_copy(TO_HOST, 10**6)
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            note_copy(TO_DEVICE, 3 * 10**6)
            return gradient.exp().exp()

    x = torch.empty(1000, 1000, device=META, requires_grad=True)
    found = time_of(lambda: Copied.apply(x).backward(torch.empty_like(x)))
    assert (found.to_host, found.to_card) == pytest.approx((0.01, 0.03))
    assert (found.backward.to_host, found.backward.to_card) == pytest.approx((0.0, 0.03))
    assert 2 * LAUNCH < found.backward.compute < found.compute
    assert found.seconds == pytest.approx(0.01 + 0.03)


@pytest.mark.slow
def test_ways_to_train_are_told_apart():
    with META:
        module = ByteGPT(num_layers=4, width=512, num_heads=8, sequence_length=512)
    tokens = torch.zeros(8, 513, dtype=torch.int64)

    def times_of(*callbacks, card="h100"):
        run = FitRun({"callbacks": list(callbacks)}, find_device(card), with_validation=False, with_times=True)
        return trace_fit(module, tokens, run).times

    plain, checkpointed, matmuls = (
        times_of(),
        times_of(ActivationCheckpointing()),
        times_of(ActivationCheckpointing(save="matmuls")),
    )
    assert set(plain) == {FIRST_STEP, STEP}
    assert 1.2 < checkpointed[STEP].seconds / plain[STEP].seconds < 1.4  # a forward is a third of a step
    assert 1.0 < matmuls[STEP].seconds / plain[STEP].seconds < 1.15
    offloaded = times_of(ActivationOffload())[STEP]
    assert offloaded.to_host > 0
    assert offloaded.to_host == pytest.approx(offloaded.to_card)
    assert offloaded.compute == pytest.approx(plain[STEP].compute, rel=0.02)
    assert times_of(card="rtx4090")[STEP].seconds > plain[STEP].seconds


def test_nobody_asks_nothing_is_counted():
    tokens = torch.zeros(2, 33, dtype=torch.int64)
    module = ByteGPT(num_layers=1, width=16, num_heads=2, sequence_length=32)
    assert trace_fit(module, tokens, FitRun({}, find_device("h100"), with_validation=False)).times == {}
