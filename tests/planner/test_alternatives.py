"""Where nothing fits: what is told to help helps, planned for real; and its words."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from support.plans import CHECKPOINTING, measured

from lightning_vram import DeviceSpec, FSDPOffloadStrategy, plan_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.memory.units import GIB, MIB, format_bytes
from lightning_vram.planner import PlanError
from lightning_vram.planner.alternatives import Alternatives, describe_alternatives, suggest_alternatives
from lightning_vram.planner.remedies import OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST, leaner_on_host
from lightning_vram.planner.scheme import Exactness, Found, Workload

CARD = DeviceSpec("card", 8 * GIB, bandwidth_bytes_per_s=1e12, flops_per_s={"fp32": 2e13}, bus_bytes_per_s=2e10)


def miss(module, batch, **arguments) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan_memory(module, batch, **arguments)
    return caught.value


def make_gpt():
    with torch.device("meta"):
        return ByteGPT(num_layers=2, width=32, num_heads=2, sequence_length=128)


class Wide(pl.LightningModule):
    """Weights are most of it: 192 MiB, with gradients and states 768 MiB."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.net = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(12)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.slow
def test_the_batch_and_the_sequence_that_are_told_fit():
    tokens = torch.zeros(16, 129, dtype=torch.int64)
    budget = miss(make_gpt(), tokens, device="cpu", budget="2MiB").minimum_bytes * 2 // 3
    ways = miss(make_gpt(), tokens, device="cpu", budget=budget)
    found = ways.ways
    assert (found.num_devices, found.strategy) == (0, None)  # the host has no other host beside it
    assert 4 <= found.batch_size < 16
    assert 32 <= found.sequence_length < 129
    message = f"batch size {found.batch_size} with accumulate_grad_batches, sequence length {found.sequence_length}, or"
    assert message in str(ways)
    for shape in ((found.batch_size, 129), (16, found.sequence_length)):
        batch = torch.zeros(shape, dtype=torch.int64)
        assert plan_memory(make_gpt(), batch, device="cpu", budget=budget).peak_bytes <= budget


@pytest.mark.slow
def test_the_devices_and_the_strategy_that_are_told_fit():
    batch = torch.zeros(4, 2048)
    error = miss(Wide(), batch, device=CARD, budget="1000MiB")
    ways = error.ways
    assert ways.host_bytes == 768 * MIB
    assert (ways.batch_size, ways.sequence_length) == (0, 0)
    assert "strategy='fsdp_offload_optimizer' (768.00 MiB of host memory" in str(error)
    assert f"{ways.num_devices} devices with FSDPOffloadStrategy(offload='none')" in str(error)
    for strategy, devices in ((ways.strategy.make(), 1), (FSDPOffloadStrategy(offload="none"), ways.num_devices)):
        own = {"strategy": strategy}
        plan = plan_memory(Wide(), batch, device=CARD, budget="1000MiB", trainer=own, devices=devices)
        assert plan.peak_bytes <= 1000 * MIB


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize(
    ("room", "code", "per_weight"),
    [
        (19, "'fsdp_offload_optimizer'", 18),
        (17, "FSDPOffloadStrategy(offload='optimizer', master='split')", 16),
        (13, "FSDPOffloadStrategy(offload='optimizer', master='split', host_state='bf16')", 12),
    ],
)
def test_a_strategy_that_is_told_fits_the_host(room, code, per_weight, monkeypatch):
    """Of these bytes 4 are gradients, in 32 bit in the first batches. Of what is small as much again must stay free."""
    num = 12 * 2048**2
    monkeypatch.setattr("lightning_vram.planner.plan.available_host_bytes", lambda: 2 * room * num)
    own = {"precision": "bf16-mixed"}
    error = miss(Wide(), torch.zeros(4, 2048), device=CARD, budget="1000MiB", trainer=own)
    assert error.ways.host_bytes == per_weight * num
    assert f"strategy={code} ({format_bytes(per_weight * num)} of host memory)" in str(error)


def test_where_the_least_has_its_peak_is_told():
    message = str(miss(Wide(), torch.zeros(4, 2048), device="cpu", budget="100MiB"))
    assert ", in the backward, mostly for 'net." in message


class Line:
    """Needs so many bytes for each sample, and refuses strategies."""

    def __init__(self, batch, num_ranks=1, asked=None):
        self.batch, self.num_ranks, self.own = batch, num_ranks, {}
        self.asked = [] if asked is None else asked

    def of(self, batch, num_ranks):
        return Line(batch, num_ranks, self.asked)

    def __call__(self, scheme):
        self.asked.append(len(self.batch))
        return measured(*scheme.parts, mib=100 + 10 * len(self.batch), ms=1)


@pytest.mark.parametrize(
    ("budget", "size", "asked"), [(150, 5, [8, 5]), (180, 8, [8]), (190, 9, [8, 9]), (110, 1, [8, 1]), (105, 0, [8])]
)
def test_a_line_leads_to_the_largest_batch_in_few_steps(budget, size, asked):
    least = replace(measured(CHECKPOINTING, mib=260, ms=1), activation_bytes=160 * MIB)
    steps = Line(torch.zeros(16))
    ways = suggest_alternatives(steps, Found(None, least, (least,)), Workload(budget * MIB), has_strategies=False)
    assert (ways.batch_size, steps.asked) == (size, asked)


def test_words():
    least = measured(CHECKPOINTING, mib=260, ms=1)
    assert describe_alternatives(least, Exactness.ANY, Alternatives()) == "What helps: budget='260.00MiB'."
    assert describe_alternatives(least, Exactness.ANY, Alternatives(), 2**20) == "What helps: a device with 260.00 MiB."
    assert describe_alternatives(least, Exactness.LOSSLESS, Alternatives(batch_size=3)) == (
        "What helps: budget='260.00MiB', batch size 3 with accumulate_grad_batches, or perhaps allow='any'."
    )
    assert describe_alternatives(least, Exactness.ANY, Alternatives(2, WEIGHTS_ON_HOST, 4 * GIB, GIB)) == (
        "What helps: budget='260.00MiB', strategy='fsdp_offload' (4.00 GiB of host memory; 1.00 GiB is available: "
        "nvme_path= keeps optimizer state on disk), or 2 devices with FSDPOffloadStrategy(offload='none')."
    )
    split = leaner_on_host(OPTIMIZER_ON_HOST, {"precision": "bf16-mixed"})[0]
    assert describe_alternatives(least, Exactness.ANY, Alternatives(0, split, 4 * GIB, 5 * GIB)) == (
        "What helps: budget='260.00MiB', or strategy=FSDPOffloadStrategy(offload='optimizer', master='split') (4.00 "
        "GiB of host memory)."
    )
