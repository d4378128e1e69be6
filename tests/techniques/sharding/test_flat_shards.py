"""Shards side by side: what comes to the device, in which dtype, and after which writes."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.sharded_nets import WIDTH, Block, make
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_vram.private_names.fsdp2 import ParameterBase, groups_of
from lightning_vram.techniques.sharding import flat_shards
from lightning_vram.techniques.sharding.flat_shards import FlatShard

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
CPU, APART = torch.device("cpu"), torch.device("cpu", 0)
KINDS = {
    "shards alone": {},
    "resident": {"is_resident": True},
    "narrow": {"dtype": torch.bfloat16},
    "narrow resident": {"dtype": torch.bfloat16, "is_resident": True},
    "narrow copy": {"dtype": torch.bfloat16, "device": APART},
    "narrow copy and resident": {"dtype": torch.bfloat16, "device": APART, "is_resident": True},
}


def parameters_of(module: Any) -> list[Any]:
    (group,) = groups_of(module)
    return group.fsdp_params


@pytest.fixture
def net(mesh) -> nn.Module:
    net = fully_shard(make(Block), mesh=mesh)
    for parameter in parameters_of(net):
        parameter.__class__ = ParameterBase
    return net


def make_lane(net: nn.Module, **options: Any) -> FlatShard:
    given = {"dtype": torch.float32, "home": CPU, "device": CPU, "pin_memory": False, "is_resident": False, **options}
    return FlatShard(parameters_of(net), **given)


def fetched(flat_shard: FlatShard) -> list[Tensor]:
    return [tensor.clone() for tensor in flat_shard.fetch()]


def assert_fetches(flat_shard: FlatShard, net: nn.Module, dtype: torch.dtype) -> None:
    """What is fetched are the values of the parameters as they are now."""
    parts = fetched(flat_shard)
    assert len(parts) == 4
    for part, parameter in zip(parts, net.parameters(), strict=True):
        assert part.dtype == dtype
        assert torch.equal(part, parameter.full_tensor().detach().flatten().to(dtype))


def test_shards_move_into_one_block_of_memory_with_their_values(net):
    before = [parameter.full_tensor().clone() for parameter in net.parameters()]
    flat_shard = make_lane(net)
    offset = 0
    for parameter, ours, value in zip(net.parameters(), parameters_of(net), before, strict=True):
        local = parameter.to_local()
        assert local.data_ptr() == flat_shard.shards.data_ptr() + 4 * offset
        assert local.storage_offset() == 0
        assert ours.memory.data_ptr() == local.data_ptr()
        assert torch.equal(parameter.full_tensor(), value)
        offset += local.numel()
    assert flat_shard.shards.numel() == offset
    assert flat_shard.shards.untyped_storage().nbytes() == 4 * offset


@torch.no_grad()
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_writes_to_the_local_part_need_no_telling(net, options):
    flat_shard = make_lane(net, **options)
    fetched(flat_shard)
    net.down.weight.to_local().fill_(6)
    assert_fetches(flat_shard, net, options.get("dtype", torch.float32))


@pytest.mark.parametrize("options", [options for kind, options in KINDS.items() if "narrow" in kind])
def test_a_lane_can_be_widened_for_a_while(net, options):
    flat_shard = make_lane(net, **options)
    for is_fp32, dtype in ((True, torch.float32), (False, torch.bfloat16), (True, torch.float32)):
        for parameter in flat_shard.parameters:
            parameter.all_gather_outputs, parameter._unsharded_param = [torch.ones(1)], "gathered"
        flat_shard.set_fp32(is_fp32=is_fp32)
        assert flat_shard.transfer_dtype == dtype
        assert_fetches(flat_shard, net, dtype)
        assert all(parameter.all_gather_outputs == [] for parameter in flat_shard.parameters)
        assert all(parameter.whole is None for parameter in flat_shard.parameters)
        flat_shard.parameters[0].all_gather_outputs = kept = [torch.ones(1)]
        flat_shard.set_fp32(is_fp32=is_fp32)  # what was gathered stays where the dtype does
        assert flat_shard.parameters[0].all_gather_outputs is kept


@pytest.mark.parametrize("is_fp32", [True, False])
def test_a_resident_copy_is_what_is_fetched_under_autocast_and_without(net, is_fp32):
    flat_shard = make_lane(net, device=APART, is_resident=True)
    flat_shard.set_fp32(is_fp32=is_fp32)
    parts = list(flat_shard.fetch())
    assert parts[0].data_ptr() == flat_shard.resident.data_ptr()
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


NUMEL = 2 * WIDTH * 9 + 9 + WIDTH


def test_with_a_narrow_copy_the_wide_shards_do_not_leave_the_host(net, monkeypatch):
    monkeypatch.setattr(flat_shards, "_record", lambda device: None)
    flat_shard = make_lane(net, dtype=torch.bfloat16, device=torch.device("meta"))
    parts = list(flat_shard.fetch())
    assert [(part.device.type, part.dtype) for part in parts] == [("meta", torch.bfloat16)] * 4
    assert torch.equal(flat_shard._low_precision, flat_shard.shards.bfloat16())
    flat_shard.set_fp32(is_fp32=True)
    assert {part.dtype for part in flat_shard.fetch()} == {torch.float32}


@pytest.fixture
def events(monkeypatch) -> list[Mock]:
    """What is recorded of copies; whoever waits for one calls ``synchronize``."""
    recorded: list[Mock] = []
    monkeypatch.setattr(flat_shards, "_record", lambda device: recorded.append(Mock()) or recorded[-1])
    return recorded


def num_waits(events: list[Mock]) -> list[int]:
    return [event.synchronize.call_count for event in events]


def test_a_refresh_waits_until_what_was_fetched_has_arrived(net, events):
    """Else the copy under way would take half of the old and half of the new."""
    flat_shard, order = make_lane(net, dtype=torch.bfloat16, device=APART), []
    fetched(flat_shard)
    events[0].synchronize.side_effect = lambda: order.append(flat_shard._low_precision[0].item())
    with torch.no_grad():
        net.up.weight.fill_(2)
    flat_shard.refresh()
    assert flat_shard._low_precision[0] == 2
    assert len(order) == 1
    assert order[0] != 2


@pytest.mark.parametrize(("device", "num"), [(APART, 1), (CPU, 0)])
def test_who_writes_to_shards_elsewhere_waits_for_the_last_reader(net, events, device, num):
    flat_shard = make_lane(net, device=device)
    flat_shard.wait_for_copies()  # nobody has read
    fetched(flat_shard)
    flat_shard.note_read()
    flat_shard.wait_for_copies()
    assert num_waits(events) == [0, num]


def test_who_writes_to_shards_waits_for_what_is_on_its_way_to_a_resident_copy(net, events):
    """Fetches of the shards as they are do not wait for it."""
    flat_shard = make_lane(net, dtype=torch.bfloat16, device=APART, is_resident=True)
    flat_shard.refresh()
    flat_shard.wait_for_copies()
    assert num_waits(events) == [1]


@torch.no_grad()
@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_copy_that_would_grow_is_dropped_unless_it_may(net, is_allowed):
    flat_shard = make_lane(net, dtype=torch.bfloat16, is_resident=True)
    flat_shard.may_grow = is_allowed
    assert_fetches(flat_shard, net, torch.bfloat16)
    flat_shard.stay_fp32()
    assert (flat_shard.resident is not None) == is_allowed
    assert_fetches(flat_shard, net, torch.float32)
    net.up.weight.fill_(3)
    flat_shard.touch()
    assert_fetches(flat_shard, net, torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_may_be_kept_from_now_on(net, dtype):
    flat_shard = make_lane(net, dtype=dtype)
    assert_fetches(flat_shard, net, dtype)
    flat_shard.keep_copy()
    assert flat_shard.resident is not None
    assert flat_shard.resident.nbytes == dtype.itemsize * NUMEL
    assert_fetches(flat_shard, net, dtype)
