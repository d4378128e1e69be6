"""A module that is sharded: what it computes, who may write to its shards, and what is left afterwards."""

from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.helpers import PlantedError, describe_module
from support.sharded_nets import (
    MODES,
    NUM_BLOCKS,
    WIDTH,
    Block,
    Net,
    assert_same,
    batch,
    gradients,
    like_shard,
    loss_of,
    make,
    on_ranks,
    part,
    sharded,
    weights,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.techniques.mixed_precision.weight_casts import find_autocast_weights
from lightning_vram.techniques.sharding import apply
from lightning_vram.techniques.sharding import group as sharded_group
from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import ShardingPlan, plan_sharding_groups

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
narrow_autocast = partial(torch.autocast, "cpu", torch.bfloat16)


def narrow_options(net: nn.Module) -> dict[str, Any]:
    found = find_autocast_weights(net)
    names = {name for name, parameter in net.named_parameters() if parameter in found}
    return {"low_precision_dtype": torch.bfloat16, "low_precision": names}


def backward(net: nn.Module, seed: int = 0) -> Tensor:
    loss = loss_of(net, part(batch(seed)))
    loss.backward()
    return loss.detach()


def assert_computes_as(net: nn.Module, plain: nn.Module, *seeds: int, is_narrow: bool = False) -> None:
    """Losses are the same, and the gradients of all backwards together."""
    for seed in seeds:
        with narrow_autocast(enabled=is_narrow):
            losses = [loss_of(one, batch(seed)) for one in (net, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        assert_same(gradients(net), gradients(plain))


# --- what it computes ---


def test_a_group_of_several_modules_ends_its_backward_once(mesh, monkeypatch):
    ended = []
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    monkeypatch.setattr(FullSharding, "finalized", lambda _, group: ended.append(group))
    sharding = FullSharding(net, mesh, ShardingPlan((("0", "1"), ("2", "3")), ()), ShardingOptions())
    for _ in range(2):
        net(torch.ones(2, WIDTH)).sum().backward()
    sharding.remove()
    assert sorted(map(ended.count, sharding.groups)) == [2, 2]


@pytest.mark.parametrize("mode", MODES)
def test_narrow_weights_have_the_bits_of_the_plain_module_under_autocast_and_without(mesh, mode):
    net, plain = make(), make()
    with sharded(net, mode, **narrow_options(net)) as sharding:
        dtypes = {flat_shard.dtype for group in sharding.groups for flat_shard in group.flat_shards}
        assert dtypes == {torch.float32, torch.bfloat16}  # float32 is the norm
        assert_computes_as(net, plain, 0, 1, is_narrow=True)
        assert_computes_as(net, plain, 2)
        assert_computes_as(net, plain, 3, is_narrow=True)


class Twice(Net):
    """Calls its first block twice, and the last within a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.blocks[0](x))
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return checkpoint(lambda x: self.head(self.norm(self.blocks[2](x))), x, use_reentrant=False)


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class Scalars(Net):
    """A parameter without a dimension, one without elements, and one of which a second rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty, self.row = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.arange(3.0)[None])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.empty.sum() + self.row.sum()


class Tied(Net):
    """One weight for the way in and the way out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, WIDTH)
        self.first.weight = nn.Parameter(torch.randn(WIDTH, 20))
        self.head = nn.Linear(20, WIDTH)
        self.head.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.repeat(1, 4)[:, :20])
        for block in self.blocks:
            x = block(x)
        return self.head(x.repeat(1, 4)[:, :20])


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Unused(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


class Buffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


KINDS = [Net, Twice, Scalars, Tied, Frozen, Unused, Buffers, Compiled]


@pytest.mark.quick_sample(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_plain_module(mesh, kind, mode):
    for reshard in (True, False):
        net, plain = make(kind), make(kind)
        with sharded(net, mode, reshard_after_forward=reshard):
            assert_computes_as(net, plain, 0, 1)
        assert_same(weights(net), weights(plain))


def compare_kinds() -> None:
    for kind in KINDS[:-1]:
        for mode in ("params", "optimizer apart", "none") if kind is Net else ("params",):
            net, plain = make(kind), make(kind)
            with sharded(net, mode):
                for seed in range(2):
                    backward(net, seed)
                    if kind is Buffers:  # statistics are those of a rank's own part
                        halves = [loss_of(plain, half) for half in batch(seed).chunk(2)]
                        (sum(halves) / 2).backward()
                    else:
                        loss_of(plain, batch(seed)).backward()
                assert_same(gradients(net), gradients(plain), 1e-5)
            assert_same(weights(net), weights(plain))


class Fork(nn.Module):
    """Takes one of two branches, which have the same shape, and leaves a third alone."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.none = Block(), Block(), Block()
        self.scales = nn.ParameterList([torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)])
        self.is_even = True

    def forward(self, x: Tensor) -> Tensor:
        branch, scale = (self.even, self.scales[0]) if self.is_even else (self.odd, self.scales[1])
        return branch(x) * scale


def compare_branches() -> None:
    rank = torch.distributed.get_rank()
    for mode in ("params", "optimizer apart", "none"):
        for names in ([("even", "odd", "none")], []):  # in a group of their own, or the root's; gathered on all ranks
            net, plain = make(Fork), make(Fork)
            scales = tuple(f"scales.{index}" for index in range(3))
            plan = ShardingPlan(tuple(names), scales)
            kind, options = MODES[mode]
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
            sharding = kind(net, mesh, plan, ShardingOptions(**options))
            for seed, sides in enumerate([(True, False), (True, True), (False, True)]):
                net.is_even = sides[rank]
                backward(net, seed)
                halves = []
                for is_even, half in zip(sides, batch(seed).chunk(2), strict=True):
                    plain.is_even = is_even
                    halves.append(loss_of(plain, half))
                (sum(halves) / 2).backward()
                assert_same(gradients(net), gradients(plain), 1e-5)
            for one in (net, plain):
                one.zero_grad()
                one.is_even = True
            backward(net)
            loss_of(plain, batch(0)).backward()
            assert_same(gradients(net), gradients(plain), 1e-5)  # of the same parameters
            sharding.remove()


def call_different_layers() -> None:
    net = make(Fork)
    plan = ShardingPlan((("even",), ("odd",)), tuple(f"scales.{index}" for index in range(3)))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    sharding = FullSharding(net, mesh, plan, ShardingOptions())
    net.is_even = torch.distributed.get_rank() == 0
    with pytest.raises(RuntimeError, match="called other sharded layers"):
        backward(net)
    sharding.remove(make_whole=False)


def test_two_ranks_compute_what_one_would_and_must_call_the_same_layers(tmp_path):
    on_ranks(tmp_path, compare_kinds, compare_branches, call_different_layers)


def keep_a_graph(net: nn.Module) -> None:
    loss = loss_of(net, batch(0))
    loss.backward(retain_graph=True)
    loss.backward()


def interleave(net: nn.Module) -> None:
    first, second = loss_of(net, batch(0)), loss_of(net, batch(1))
    (first + second).backward()
    first, second = loss_of(net, batch(2)), loss_of(net, batch(3))
    second.backward()
    first.backward()


def freeze_and_thaw(net: nn.Module) -> None:
    for seed, is_trained in enumerate((True, False, True)):
        net.blocks[0].requires_grad_(is_trained)
        net.head.bias.requires_grad_(not is_trained)
        backward(net, seed)


@pytest.mark.parametrize("use", [keep_a_graph, interleave, freeze_and_thaw])
def test_forwards_and_backwards_may_come_as_they_like(mesh, use):
    net, plain = make(), make()
    with sharded(net):
        for each in (net, plain):
            use(each)
        assert_same(gradients(net), gradients(plain))


def test_hooks_after_the_accumulation_are_refused(mesh):
    net = make()
    with sharded(net, "params apart"):
        net.head.bias.register_post_accumulate_grad_hook(lambda p: None)
        with pytest.raises(
            RuntimeError, match=r"has a hook of register_post_accumulate_grad_hook, which does not run while"
        ):
            backward(net, 0)


# --- shards and their writers ---


def new_values(net: nn.Module) -> dict[str, Tensor]:
    fresh = make(seed=1).state_dict()
    return {name: like_shard(fresh[name], value) for name, value in net.state_dict().items()}


def by_state_dict(net: nn.Module) -> None:
    net.load_state_dict(new_values(net))


def by_data(net: nn.Module) -> None:
    for name, value in new_values(net).items():
        net.get_parameter(name).data.copy_(value)


@torch.no_grad()
def by_parts(net: nn.Module) -> None:
    for name, value in new_values(net).items():
        net.get_parameter(name).to_local().copy_(value.to_local())


@torch.no_grad()
def all_at_once(net: nn.Module) -> None:
    values = [value + 0 for value in new_values(net).values()]
    torch._foreach_zero_(list(net.parameters()))
    for parameter, value in zip(net.parameters(), values, strict=True):
        parameter.add_(value)


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("is_low_precision", [False, True])
@pytest.mark.parametrize("write", [by_state_dict, by_data, by_parts, all_at_once])
@pytest.mark.parametrize("mode", MODES)
def test_values_that_are_written_to_shards_count_from_the_next_forward(mesh, mode, write, is_low_precision):
    net, plain = make(), make(seed=1)
    with (
        sharded(net, mode, **narrow_options(net) if is_low_precision else {}),
        narrow_autocast(enabled=is_low_precision),
    ):
        loss_of(net, batch(0)).backward()  # what has come to the device must not stay
        write(net)
        assert torch.equal(net(batch(1)), plain(batch(1)))
        assert_same(weights(net), weights(plain))
        shards = net.state_dict()
        net.load_state_dict({name: like_shard(value, shards[name]) for name, value in make().state_dict().items()})
        with torch.no_grad():
            assert torch.equal(net(batch(1)), make()(batch(1)))
        write(net)
        assert torch.equal(net(batch(1)), plain(batch(1)))


@pytest.mark.parametrize("mode", ["optimizer", "optimizer apart"])
def test_a_copy_on_the_device_is_made_once_where_nobody_writes(mesh, mode, monkeypatch):
    refreshed = []
    refresh = sharded_group.FlatShard.refresh
    monkeypatch.setattr(
        sharded_group.FlatShard, "refresh", lambda flat_shard: (refreshed.append(flat_shard), refresh(flat_shard))
    )
    net = make()
    with sharded(net, mode) as sharding:
        num_lanes = sum(len(group.flat_shards) for group in sharding.groups)
        for seed in range(3):
            backward(net, seed)
            net.zero_grad()
            backward(net, seed)
        assert len(refreshed) == num_lanes
        net.head.bias.norm()
        backward(net)
        assert len(refreshed) == num_lanes + 1


def test_meta_layers_get_values_group_by_group(mesh):
    with torch.device("meta"):
        net = Net()
    with sharded(net, seed=3) as sharding:
        assert not any(parameter.is_meta for parameter in net.parameters())
        assert torch.isfinite(backward(net))
        first = weights(net)
        assert sharding.remove() == {}  # there was nothing to go back to
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    with torch.device("meta"):
        again = Net()
    with sharded(again, seed=3):
        assert_same(weights(again), first)


# --- and back ---


@pytest.mark.quick_sample(4)
@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("kind", [Net, Scalars, Tied, Frozen, Buffers])
@pytest.mark.parametrize("mode", ["params", "optimizer apart", "none"])
def test_removed_the_module_is_what_it_was(mesh, mode, kind, is_used):
    net, plain = make(kind), make(kind)
    before, parameters = describe_module(net), dict(net.named_parameters(remove_duplicate=False))
    with sharded(net, mode) as sharding:
        shards = dict(net.named_parameters())
        if is_used:
            assert_computes_as(net, plain, 0)
        replaced = sharding.remove()
    assert describe_module(net) == before
    assert not any(isinstance(part, FSDPModule) for part in net.modules())
    for name, parameter in net.named_parameters(remove_duplicate=False):
        assert parameter is parameters[name]
    changed = {name: shard for name, shard in shards.items() if shard is not parameters[name]}
    assert {id(shard): id(parameter) for shard, parameter in replaced.items()} == {
        id(shard): id(parameters[name]) for name, shard in changed.items()
    }
    assert_same(weights(net), weights(plain))
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert_computes_as(net, plain, 1, 2)
    for one, other in zip(net.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


def test_what_was_sharded_is_freed_while_its_module_is_sharded(mesh):
    net = make()
    weight = net.head.weight
    with sharded(net):
        with torch._C.DisableTorchFunctionSubclass():
            assert weight.numel() == 0
        with pytest.raises(RuntimeError, match="before the module was sharded"):
            weight.sum()
    assert weight is net.head.weight
    assert weight.shape == (20, WIDTH)


def test_layers_that_the_user_has_sharded_stay_sharded(mesh):
    net, plain = make(), make()
    fully_shard(net.blocks[1], mesh=mesh)
    shard = net.blocks[1].up.weight
    with sharded(net) as sharding:
        assert all(p.sharded_param is not shard for group in sharding.groups for p in group.parameters)
        assert_computes_as(net, plain, 0)
    assert net.blocks[1].up.weight is shard
    assert isinstance(net.blocks[1], FSDPModule)
    assert not isinstance(net.blocks[0], FSDPModule)
    assert_computes_as(net, plain, 1)


@pytest.mark.parametrize(("name", "num_before"), [("fully_shard", 0), ("fully_shard", NUM_BLOCKS), ("take_over", 1)])
def test_an_error_in_the_midst_leaves_the_module_as_it_was(mesh, monkeypatch, name, num_before):
    net, plain = make(), make()
    for each in (net, plain):
        turned = each.blocks[1].up.weight
        turned.data = turned.data.t().contiguous().t()
    before, parameters = describe_module(net), [(name, id(p)) for name, p in net.named_parameters()]
    calls, real = [], getattr(apply, name)

    def fail_at_last(*args: Any, **kwargs: Any) -> Any:
        if len(calls) == num_before:
            raise PlantedError
        calls.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(apply, name, fail_at_last)
    with pytest.raises(PlantedError), sharded(net):
        pytest.fail("it has an error")
    assert describe_module(net) == before
    assert [(name, id(p)) for name, p in net.named_parameters()] == parameters
    assert [p.stride() for p in net.parameters()] == [p.stride() for p in plain.parameters()]
    assert_computes_as(net, plain, 0)


def remove_on_two() -> None:
    for mode in ("params", "optimizer apart", "none"):
        for kind in (Net, Scalars):
            net, plain = make(kind), make(kind)
            before = describe_module(net)
            with sharded(net, mode):
                backward(net)
            assert describe_module(net) == before
            assert_same(weights(net), weights(plain))
            assert not gradients(net) or kind is Scalars  # each has that of its part only
            net.zero_grad()
            assert torch.equal(backward(net), loss_of(plain, part(batch(0))).detach())


def leave_sharded_on_two() -> None:
    net = make()
    sharding = FullSharding(
        net, torch.distributed.device_mesh.init_device_mesh("cpu", (2,)), plan_sharding_groups(net), ShardingOptions()
    )
    assert sharding.remove(make_whole=torch.distributed.get_rank() < 0) == {}
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())


def test_two_ranks_have_their_module_back(tmp_path):
    on_ranks(tmp_path, remove_on_two, leave_sharded_on_two)


# --- what a device would wait for ---


def test_the_computation_waits_for_what_is_fetched_on_its_own_kind_of_stream(mesh, monkeypatch):
    """The streams of torch.accelerator do not wait for events of torch.cuda, without a word."""
    net, waited, fetched, reads = make(), [], object(), []
    stream = Mock(wait_event=waited.append, wait_stream=waited.append)
    with sharded(net) as sharding:
        backward(net)
        group = sharding.groups[0]
        monkeypatch.setattr(group.device_handle, "current_stream", lambda: stream)
        for flat_shard in group.flat_shards:
            monkeypatch.setattr(flat_shard, "note_read", lambda: reads.append(list(waited)))
        group.unshard()
        group._fetched = fetched
        group.wait_for_unshard()
        group.wait_for_unshard()  # nothing was fetched since
        assert waited.count(fetched) == 1
        assert len(reads) == len(group.flat_shards)
        assert all(fetched in before for before in reads)
        group.reshard()


def test_a_step_waits_for_readers_of_the_shards_before_it_writes(mesh, monkeypatch):
    """As for a forward without gradients between the backward and the step, which is still on its way."""
    net, order = make(), []
    with sharded(net) as sharding:
        host = HostOptimizers(sharding, num_threads=1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        host.attach([optimizer])
        backward(net)
        weight = net.head.weight._local_tensor
        before = weight.clone()
        group = host._groups[net.head.weight]
        monkeypatch.setattr(group.flat_shards[0], "wait_for_copies", lambda: order.append(torch.equal(weight, before)))
        optimizer.step()
        host.finish()
        host.let_go(sharding.remove())
    assert order[0]
    assert not torch.equal(weight, before)
