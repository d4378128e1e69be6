"""Plans of a small model, for cards and for the host; what is refused, and what is said."""

import re

import pytest
import torch
from support.planned_models import Wide

from lightning_vram import DeviceSpec, plan_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.estimation import estimate_memory
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.planner import PlanError

TOKENS = torch.zeros(8, 129, dtype=torch.int64)
CARD = DeviceSpec("card", 8 * GIB, bandwidth_bytes_per_s=1e12, flops_per_s={"fp32": 2e13}, bus_bytes_per_s=2e10)


def make():
    with torch.device("meta"):
        return ByteGPT(num_layers=3, width=128, num_heads=2, sequence_length=128)


def test_what_fits_is_left_as_it_is_and_what_is_being_done_is_told():
    told, own = [], {"precision": "bf16-mixed"}
    plan = plan_memory(make(), TOKENS, device="cpu", trainer=own, on_progress=lambda *stage: told.append(stage))
    assert told[0][0] == "tracing baseline"
    assert all(0 <= done <= 1 for _, done in told)
    assert not plan.is_needed
    assert plan.step_time_ratio == 1
    assert plan.trainer_kwargs() == own
    assert "trainer: {}" in plan.to_yaml()


@pytest.mark.slow
def test_the_plan_is_what_an_estimate_of_it_says():
    plain = estimate_memory(make(), TOKENS, device=CARD, find_limits=False)
    budget = plain.needed_bytes - 20 * MIB
    plan = plan_memory(make(), TOKENS, device=CARD, budget=budget)
    assert plan.is_needed
    assert plan.step_time_ratio >= 1
    estimate = estimate_memory(make(), TOKENS, device=CARD, trainer=plan.trainer_kwargs(), find_limits=False)
    assert estimate.needed_bytes <= plan.peak_bytes <= budget
    assert plan.peak_bytes - estimate.needed_bytes < MIB  # what only tensors with values keep


@pytest.mark.slow
def test_weights_on_the_host_where_they_do_not_fit_the_card():
    module, batch = Wide(4096), torch.zeros(4, 4096)
    message = r"No plan fits 2\.00 GiB\. .*, strategy='fsdp_offload', or perhaps allow='lossless' or 'any'\."
    with pytest.raises(PlanError, match=message) as caught:
        plan_memory(module, batch, device=CARD, budget="2GiB")
    assert caught.value.minimum_bytes > 2 * GIB
    plan = plan_memory(module, batch, device=CARD, budget="2GiB", allow="lossless")
    assert plan.best.scheme.parts[0].name == "FSDPOffloadStrategy"
    assert type(plan.trainer_kwargs()["strategy"]).__name__ == "FSDPOffloadStrategy"


@pytest.mark.parametrize(("budget", "num_bytes"), [(0.5, 4 * GIB), ("auto", 8 * GIB)])
def test_a_budget_may_be_a_share_or_all_of_the_device(budget, num_bytes):
    assert plan_memory(make(), TOKENS, device=CARD, budget=budget).budget_bytes == num_bytes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"allow": "most"}, ValueError, "plan_memory(allow) must be 'exact', 'lossless' or 'any', got 'most'."),
        ({"budget": "9GiB"}, ValueError, "plan_memory(budget) must be at most the 8.00 GiB that card has, got '9GiB'."),
        ({"budget": "much"}, ValueError, "plan_memory(budget)"),
        ({"budget": 0}, ValueError, "plan_memory(budget) must be above 0, got 0."),
        ({"budget": 20}, ValueError, "plan_memory(budget) has no unit, got 20: write '20GiB'."),
        ({"host_memory": -1}, ValueError, "plan_memory(host_memory) must not be negative, got -1."),
        ({"host_memory": 64}, ValueError, "plan_memory(host_memory) has no unit, got 64: write '64GiB'"),
        ({"budget": 1.5}, ValueError, "plan_memory(budget) as a share of the device must be above 0 and at most 1"),
        ({"budget": [1]}, TypeError, "plan_memory(budget) must be 'auto', bytes, text such as '20GiB', or a share"),
        ({"devices": 0}, ValueError, "plan_memory(devices)"),
        ({"trainer": {"colour": 1}}, TypeError, "takes arguments of Trainer, got 'colour'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        plan_memory(make(), TOKENS, **({"device": CARD} | arguments))
