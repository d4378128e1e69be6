"""Shards whose values code sets, and those that a step is writing."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from support.shard_reads import NEW, READS, save, values_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_vram.private_names.fsdp2 import calls_derived_dispatch
from lightning_vram.techniques.sharding.parameter import OwnedTensor, own, unwatch, watch

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
OLD = 2.0
VALUES = torch.arange(6.0).view(3, 2)


class Owner:
    """Writes to its shard late, as a step does, when somebody wants to use it."""

    is_late, used = True, None

    def __init__(self, shard):
        self.local = shard._local_tensor.detach()
        self.num_uses = self.num_writes = 0

    def before_use(self, tensor):
        self.num_uses += 1
        if self.is_late:
            self.local.fill_(NEW)
            self.is_late = False

    def after_write(self):
        self.num_writes += 1


@pytest.fixture
def late(mesh):
    """A shard, and its owner, which has yet to write to it."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    owner = Owner(parameter)
    own(parameter, owner)
    return parameter, owner


@pytest.fixture
def shard(late):
    late[1].is_late = False
    return late[0]


@torch.no_grad()
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_way_to_read_goes_through_the_owner(late, read):
    parameter, owner = late
    result = values_of(read(parameter))
    assert torch.equal(result, torch.full_like(result, NEW))
    assert owner.num_uses >= 1
    assert owner.num_writes == 0
    assert type(parameter) is OwnedTensor


needs_dispatch = pytest.mark.skipif(not calls_derived_dispatch, reason="not seen before torch 2.13")


@needs_dispatch
@torch.no_grad()
@pytest.mark.parametrize(
    ("use", "num_writes"),
    [
        (lambda p, other: p.add_(1), 1),
        (lambda p, other: torch.add(other, 1, out=p), 1),
        (lambda p, other: torch._foreach_add_([p, other], 1), 1),
        (lambda p, other: other.copy_(p), 0),
        (lambda p, other: other.lerp_(p, 0.5), 0),
    ],
)
def test_the_owner_is_told_of_writes_to_the_shard_only(late, use, num_writes):
    parameter, owner = late
    use(parameter, torch.ones_like(parameter))
    assert owner.num_writes == num_writes


def test_a_gradient_flows_to_the_shard(late):
    parameter, _ = late
    (parameter * parameter).sum().backward()
    assert torch.equal(parameter.grad.full_tensor(), torch.full((3, 2), 2 * NEW))


def test_whole_values_are_taken(shard):
    local = shard._local_tensor
    shard.data = VALUES
    assert torch.equal(shard.full_tensor(), VALUES)
    assert shard._local_tensor is local  # the memory of its lane


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
    assert type(shard) is OwnedTensor


# --- shards that are being written: whoever reads waits, whatever way he takes ---


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
