"""Whoever reads a sharded tensor that is being written waits, whatever way he takes."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from support.shard_reads import NEW, READS, save, values_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_vram.techniques.sharding.parameter import OwnedTensor, unwatch, watch

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
OLD = 2.0


class Write:
    """Writes past the watch, as another thread would."""

    def __init__(self, tensor: DTensor) -> None:
        self._local = tensor._local_tensor.detach()
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        self._local.fill_(NEW)


@pytest.fixture
def parameter(mesh) -> DTensor:
    return nn.Parameter(distribute_tensor(torch.full((4, 3), OLD), mesh, [Shard(0)]))


@torch.no_grad()
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_to_read_gives_what_was_written(parameter, read):
    write = Write(parameter)
    watch([parameter], write)
    assert isinstance(parameter, OwnedTensor)
    result = values_of(read(parameter))
    assert torch.equal(result, torch.full_like(result, NEW))
    assert write.num_calls == 1
    assert type(parameter) is DTensor
    read(parameter)
    assert write.num_calls == 1


@torch.no_grad()
@pytest.mark.parametrize("change", [lambda p: p.add_(1), lambda p: p.data.add_(1), lambda p: p.to_local().add_(1)])
def test_a_write_comes_after_the_one_under_way(parameter, change):
    watch([parameter], Write(parameter))
    change(parameter)
    assert torch.equal(parameter.to_local(), torch.full((4, 3), NEW + 1))


SCALAR_USES: dict[str, Callable[[Tensor], object]] = {
    "operator": lambda t: 2 * t / 2,
    "foreach": lambda t: torch._foreach_mul([t], 1.0)[0],
    "float": float,
    "text": lambda t: float(f"{t}"),
    "numpy": lambda t: t.numpy(),
    "data": lambda t: t.data,
    "deepcopy": copy.deepcopy,
    "torch.save": save,
}


@pytest.mark.parametrize("use", SCALAR_USES.values(), ids=SCALAR_USES)
def test_whoever_uses_a_plain_tensor_waits(use):
    plain, calls = torch.tensor(OLD), []
    alias = plain.detach()
    watch([plain], lambda: calls.append(alias.fill_(NEW)))
    assert isinstance(plain, Tensor)
    assert float(use(plain)) == NEW
    assert len(calls) == 1
    assert type(plain) is Tensor
    assert not vars(plain)


def test_after_unwatch_nobody_waits(parameter):
    write = Write(parameter)
    watch([parameter], write)
    unwatch([parameter])
    assert type(parameter) is DTensor
    assert torch.equal(parameter.to_local(), torch.full((4, 3), OLD))
    assert write.num_calls == 0


def test_a_second_watch_takes_the_place_of_the_first(parameter):
    write = Write(parameter)
    watch([parameter], lambda: pytest.fail("an older step"))
    watch([parameter], write)
    parameter.to_local()
    assert write.num_calls == 1


def test_tensors_that_are_watched_can_die_and_what_waits_for_them_with_them(mesh):
    tensor = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    write = Write(tensor)
    write.tensor = tensor  # as a group has its shards
    watch([tensor], write)
    gone = weakref.ref(write)
    del tensor, write
    gc.collect()
    assert gone() is None
