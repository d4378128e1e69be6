"""Shards whose values code sets."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_vram.techniques.sharding.gathered import SettableShard, make_settable, unwatch, watch

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
VALUES = torch.arange(6.0).view(3, 2)


@pytest.fixture
def shard(mesh):
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    make_settable([parameter])
    return parameter


def test_whole_values_are_taken(shard):
    local = shard._local_tensor
    shard.data = VALUES
    assert torch.equal(shard.full_tensor(), VALUES)
    assert shard._local_tensor is local  # the memory of its lane


def test_sharded_values_are_taken(shard, mesh):
    shard.data = distribute_tensor(VALUES, mesh, [Shard(0)])
    shard.data = shard.data * 0.5 + shard.data * 0.5
    assert torch.equal(shard.full_tensor(), VALUES)


@pytest.mark.parametrize("values", [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bfloat16)])
def test_other_shapes_and_dtypes_are_refused(shard, values):
    message = (
        rf"^While fsdp_offload shards a model, `parameter\.data = values` needs the same shape and dtype: "
        rf"the parameter has \(3, 2\) and torch.float32, the values have \({values.shape[0]}, "
        rf"{values.shape[1]}\) and {values.dtype}\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        shard.data = values


def test_copies_and_files_are_plain_shards(shard):
    shard.data = VALUES
    for twin in (copy.deepcopy(shard), pickle.loads(pickle.dumps(shard))):
        assert type(twin) is DTensor
        assert torch.equal(twin.full_tensor(), VALUES)
    assert type(shard) is SettableShard


@pytest.mark.parametrize("read", [lambda p: p * 1, lambda p: p.data, copy.deepcopy])
def test_it_is_settable_again_after_a_watch(shard, read):
    calls = []
    watch([shard], lambda: calls.append("wrote"))
    read(shard)
    assert calls == ["wrote"]
    assert type(shard) is SettableShard
    watch([shard], lambda: calls.append("wrote"))
    shard.data = VALUES  # after what is being written
    assert calls == ["wrote"] * 2
    assert torch.equal(shard.full_tensor(), VALUES)


def test_a_watch_that_is_called_off_leaves_it_settable(shard):
    watch([shard], lambda: None)
    watch([shard], lambda: None)
    unwatch([shard])
    assert type(shard) is SettableShard
