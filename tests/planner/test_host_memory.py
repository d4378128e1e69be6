"""Where the host has too little for a strategy, a plan has less there: as many bytes as its run takes."""

import pytest
import torch
from support.host_layers import Layers, exceptions, host_bytes
from support.offload_nets import leave_group
from torch import nn

from lightning_vram import DeviceSpec, plan_memory
from lightning_vram.memory.units import GIB, MIB, format_bytes

CARD = DeviceSpec("card", 8 * GIB, bandwidth_bytes_per_s=1e12, flops_per_s={"fp32": 2e13}, bus_bytes_per_s=2e10)
OWN = {"precision": "bf16-mixed"}
BUDGET = 600 * MIB  # with 508 MiB of context, and segments of the allocator
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _alone():
    yield
    leave_group()


class Wide(Layers):
    """Weights, gradients and states are most of it: 193 MiB on the device."""

    def __init__(self):
        super().__init__(num_batches=3)
        self.net = nn.Sequential(nn.Linear(16, 1024), *(nn.Linear(1024, 1024) for _ in range(12)))


class Counted(Wide):
    def on_train_batch_end(self, *unused):
        self.host_bytes.append(host_bytes(self) - exceptions(self))


NUM = sum(p.numel() for p in Wide().parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "allow", "host", "per_weight"),
    [
        (33, "lossless", {"master": "split"}, 16),
        (37, "lossless", {}, 18),
        (25, "any", {"master": "split", "host_state": "bf16"}, 12),
    ],
)
def test_a_plan_keeps_to_the_host_memory_and_its_run_takes_what_it_tells(room, allow, host, per_weight, make_trainer):
    """As much again must stay free of what is so small; 4 bytes are gradients, in 32 bit in the first batches."""
    plan = plan_memory(
        Wide(), torch.zeros(8, 16), device=CARD, budget=BUDGET, host_memory=room * NUM, allow=allow, trainer=OWN
    )
    assert plan.host_bytes == per_weight * NUM
    assert plan.peak_bytes <= BUDGET
    (part,) = plan.best.scheme.parts
    assert part.init_args == {"offload": part.init_args["offload"], **host}
    assert f", {format_bytes(plan.host_bytes)} of host memory, estimated step time " in plan.to_yaml()
    model, arguments = Counted(), plan.trainer_kwargs()
    trainer = make_trainer(**arguments, max_epochs=1)
    trainer.fit(model)
    copies = 0 if host else 2 * NUM  # where the CPU is the device, they are made for each fetch
    assert max(model.host_bytes) == trainer.strategy.host_bytes == plan.host_bytes - copies
