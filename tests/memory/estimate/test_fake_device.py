"""The card that is not there: its backward runs, values that follow from the program are known."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.helpers import TinyGPT
from torch import nn
from torch.optim import AdamW

from lightning_vram.memory.estimate.fake_device import FAKE_GPU, FakeTensors, UntouchedWeights, fake_device, fake_ranks
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.private_names.dispatcher import FakeTensor

MIB = 2**20


def a_card():
    return fake_device(num_bytes=64 * MIB, allocated_bytes=lambda: 0, on_pin=lambda tensor: None)


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


@pytest.fixture
def device():
    with a_card() as (_, values):
        yield values


def test_numbers_made_by_the_program_are_known_on_the_host_and_on_the_card(device):
    for where in ("cpu", FAKE_GPU):
        number = torch.tensor(3.0, device=where) * 2 + 1
        assert isinstance(number, FakeTensor)
        assert number.item() == 7
        assert torch.tensor([1, 5, 2], device=where).max().item() == 5
        assert torch.arange(4, device=where).tolist() == [0, 1, 2, 3]
    assert not device.guesses


def test_writes_of_known_numbers_keep_a_tensor_known(device):
    step = torch.zeros((), device=FAKE_GPU)
    step += 1
    torch._foreach_add_([step], 2)
    assert step.item() == 3
    flags = torch.zeros(3)
    flags[1] = 4
    assert flags.tolist() == [0, 4, 0]


def test_writes_of_data_make_a_tensor_unknown_and_all_that_shares_its_memory(device):
    counts = torch.zeros(3, dtype=torch.int64)
    part = counts[1:]
    part.copy_(torch.randint(0, 9, (2,)))
    with pytest.raises(RuntimeError):
        counts[1].item()


def test_a_float_that_depends_on_data_is_one_and_that_is_said(device):
    loss = nn.Linear(3, 1)(torch.randn(2, 3)).mean()
    assert loss.item() == 1
    assert list(device.guesses) == [
        "The step reads numbers that depend on the data. Each was taken to be 1.",
    ]


def test_tensors_are_said_to_be_equal_and_that_is_said(device):
    assert torch.equal(torch.randn(3, device=FAKE_GPU), torch.randn(3, device=FAKE_GPU))
    assert list(device.guesses) == ["The step compares tensors by value. They were taken to be equal."]


def test_an_integer_that_depends_on_data_is_refused(device):
    with pytest.raises(RuntimeError):
        torch.randint(0, 9, ()).item()
    with pytest.raises(RuntimeError):
        bool(torch.randn(()) > 0)


@pytest.mark.parametrize(
    "pick",
    [
        lambda table, rows: nn.functional.embedding(rows, table),
        lambda table, rows: table[:, rows],
        lambda table, rows: table.index_select(0, rows),
        lambda table, rows: table.gather(1, rows[None]),
        lambda table, rows: nn.functional.embedding_bag(rows[None], table),
    ],
)
@pytest.mark.parametrize("where", ["cpu", FAKE_GPU])
def test_known_indices_out_of_range_are_refused(device, pick, where):
    table = torch.randn(6000, 6000, device=where).requires_grad_()
    pick(table, torch.arange(6000, device=where))
    with pytest.raises(IndexError, match=r"index 6000 is out of bounds for dimension \d with size 6000"):
        pick(table, torch.arange(1, 6001, device=where))
    pick(table, torch.randint(9000, (3,), device=where))  # nobody knows


REAL_IDS = torch.ones(2, 9, dtype=torch.int64)


def test_values_of_data_are_looked_at_for_indices_and_for_nothing_else(device):
    ids = torch.empty(2, 9, dtype=torch.int64)
    device.know(ids, REAL_IDS)
    places = (ids.ne(0).cumsum(1) - 1).to(FAKE_GPU)
    assert device.is_unknown(places)
    with pytest.raises(RuntimeError):
        places.max().item()
    nn.functional.embedding(places, torch.empty(9, 2, device=FAKE_GPU))
    with pytest.raises(IndexError, match="index 8 is out of bounds for dimension 0 with size 8"):
        nn.functional.embedding(places, torch.empty(8, 2, device=FAKE_GPU))
