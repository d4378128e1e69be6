"""Where nothing fits: the least is told, and what helps, by the figures of the search."""

from dataclasses import replace

import pytest
import torch
from support.planned_models import Wide
from support.plans import CHECKPOINTING, measured

from lightning_vram import plan_memory
from lightning_vram.memory.units import MIB
from lightning_vram.planner import PlanError
from lightning_vram.planner.plan import describe_minimum
from lightning_vram.planner.scheme import Exactness, Workload
from lightning_vram.planner.search import WEIGHTS_ON_HOST

LEAST = measured(CHECKPOINTING, mib=260, ms=1)
START = "No plan fits 100.00 MiB. The minimum found is 260.00 MiB, with ActivationCheckpointing. What helps: "


def test_where_the_least_has_its_peak_is_told():
    with pytest.raises(PlanError, match=r", in the backward, mostly for 'net\."):
        plan_memory(Wide(), torch.zeros(4, 2048), device="cpu", budget="100MiB")


@pytest.mark.parametrize(
    ("states", "activations", "may_choose", "helps"),
    [
        (0, 0, True, "budget='260.00MiB'."),
        (170, 0, False, "budget='260.00MiB'."),
        (170, 0, True, "budget='260.00MiB', or strategy='fsdp_offload'."),
        (
            170,
            160,
            True,
            "budget='260.00MiB', strategy='fsdp_offload', or a smaller batch with accumulate_grad_batches.",
        ),
    ],
)
def test_what_would_leave_too_much_is_not_told(states, activations, may_choose, helps):
    least = replace(LEAST, states_bytes=states * MIB, activation_bytes=activations * MIB)
    workload = Workload(100 * MIB)
    assert describe_minimum(least, workload, Exactness.ANY, None, may_choose_strategy=may_choose) == START + helps
    on_host = replace(least, scheme=least.scheme + WEIGHTS_ON_HOST)
    assert "strategy='" not in describe_minimum(on_host, workload, Exactness.ANY, None, may_choose_strategy=True)


def test_a_larger_budget_needs_a_device_that_has_it():
    told = describe_minimum(LEAST, Workload(MIB), Exactness.LOSSLESS, 200 * MIB, may_choose_strategy=False)
    assert told == f"{START.replace('100.00', '1.00')}a device with 260.00 MiB, or perhaps allow='any'."
