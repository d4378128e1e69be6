"""The card that is not there: its backward runs, its module answers, and weights of any size take no memory."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.helpers import TinyGPT
from torch import nn
from torch.optim import AdamW

from lightning_vram.memory.estimate.fake_device import (
    FAKE_GPU,
    FakeTensors,
    UntouchedWeights,
    fake_device,
    fake_ranks,
)
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.private_names.dispatcher import FakeTensor

MIB = 2**20


def a_card(pinned=None, allocated=lambda: 0):
    return fake_device(
        num_bytes=64 * MIB, allocated_bytes=allocated, on_pin=[].append if pinned is None else pinned.append
    )


def test_a_step_runs_on_it_and_takes_no_memory():
    with a_card():
        layer = nn.Linear(4096, 4096, bias=False).to(FAKE_GPU)
        optimizer = AdamW(layer.parameters())
        with track_memory(layer, optimizers=[optimizer]) as tracker:
            layer(torch.empty(2, 4096, device=FAKE_GPU)).sum().backward()
            optimizer.step()
    weight = 4096 * 4096 * 4
    timeline = tracker.timeline
    assert timeline.device == "lazy:0"
    assert timeline.peak_by_phase["backward"] >= 2 * weight
    assert timeline.live_bytes >= 4 * weight  # weight, gradient, two states


def test_fakes_share_what_the_real_ones_share():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[1:])
    with a_card() as (mode, _):
        fakes = FakeTensors(mode, FAKE_GPU)
        copied = copy.deepcopy(model, {id(one): fakes.fake(one) for one in (*model.parameters(), *model.buffers())})
    assert copied[1].weight is copied[0].weight
    assert isinstance(copied[0].weight, FakeTensor)
    assert copied.view.untyped_storage()._cdata == copied[0].weight.untyped_storage()._cdata
    assert copied.view.stride() == model.view.stride()
    assert type(model[0].weight) is nn.Parameter


def test_what_is_made_on_a_stream_knows_it_by_the_order_of_sight():
    def streams_of_a_run():
        with a_card(), track_memory() as tracker:
            held = [torch.empty(8, device=FAKE_GPU)]
            for stream in (torch.Stream(FAKE_GPU), torch.lazy.Stream()):
                with stream:
                    held.append(torch.empty(8, device=FAKE_GPU))
                    tracker.ledger.note_scratch("aten.mm.default", FAKE_GPU, [512])
            held.append(torch.empty(8, device=FAKE_GPU))
        return [allocation.stream for allocation in tracker.timeline.allocations]

    assert streams_of_a_run() == streams_of_a_run() == [0, 1, 1, 2, 2, 0]  # the ids of the card's streams go on


def test_ranks_that_are_not_there_say_what_this_one_says():
    with a_card(), fake_ranks(4):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 4)
        for device in ("cpu", FAKE_GPU):
            part = torch.empty(8, device=device)
            parts = [torch.empty(8, device=device) for _ in range(4)]
            dist.all_gather(parts, part)
            dist.reduce_scatter(part, parts)
            dist.all_reduce(part)
        dist.barrier()
        flags = torch.tensor([3, 5])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        assert flags.tolist() == [3, 5]
        told = [None] * 4
        dist.all_gather_object(told, {"a": 1})
        assert told == [{"a": 1}] * 4


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_weights_take_no_memory():
    with UntouchedWeights():
        layer = nn.Linear(16, 16)  # what is loaded at the first time
        before = resident_bytes()
        layers = [nn.Linear(8192, 8192) for _ in range(8)]
        layers += [copy.deepcopy(layers[0]), nn.Embedding(8192, 8192)]
        drawn = torch.randn(8192, 8192)
        truncated = nn.init.trunc_normal_(torch.empty(8192, 8192), std=0.02)
    assert resident_bytes() - before < 128 * MIB  # half of one of them; what other tests left goes on
    assert layer.weight.abs().sum() > 0
    assert drawn.shape == truncated.shape == (8192, 8192)


def test_small_tensors_have_their_values():
    def make() -> TinyGPT:
        torch.manual_seed(0)
        return TinyGPT()

    plain = make()
    with UntouchedWeights():
        small = make()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), small.parameters(), strict=True))
    assert rates == [0.0, 0.25, 0.5]
    assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def test_it_ends_with_the_block():
    with UntouchedWeights():
        pass
    assert nn.Linear(1024, 1024).weight.abs().sum() > 0
