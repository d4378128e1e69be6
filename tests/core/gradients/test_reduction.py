"""Gradients averaged and buffers broadcast by hand, against what DistributedDataParallel does itself."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.sharded_nets import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.core import gradients as averaging
from lightning_vram.core.gradients import (
    expect_buffer_sync,
    has_collectives_in_forward,
    reduce_gradients,
    sync_buffers,
    why_reducer_is_needed,
)

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


class Net(nn.Module):
    """Two types, a layer only rank 1 uses, one nobody uses, a frozen one, a tied weight, a layout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(()))
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(7, 5)
        self.second.weight = self.first.weight
        self.conv = nn.Conv2d(5, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(4, 3).double()
        self.some = nn.Linear(3, 3).double()
        self.none = nn.Linear(3, 3)
        self.frozen = nn.Linear(7, 7).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, use_some: bool) -> Tensor:
        x = self.frozen(x)
        x = (self.first(x) + self.second(x) * self.scale)[..., None, None].expand(-1, -1, 4, 4)
        x = self.wide(self.conv(x).mean((2, 3)).double())
        return self.some(x) if use_some else x


def make(**options: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = Net()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return DistributedDataParallel(net, find_unused_parameters=True, **options)


def gradients(ddp: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in ddp.module.named_parameters()}


def assert_same(one: dict[str, Tensor | None], other: dict[str, Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor is None) == (other[name] is None), name
        assert tensor is None or torch.equal(tensor.to_dense(), other[name].to_dense()), name


def compare_three_steps(bucket_bytes: int, as_view: bool) -> None:
    rank = dist.get_rank()
    averaging._BUCKET_BYTES = bucket_bytes
    theirs, ours = make(gradient_as_bucket_view=as_view), make(gradient_as_bucket_view=as_view)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x = torch.randn(4, 7)
        with theirs.no_sync():
            theirs(x, False).sum().backward()
        theirs(-x, rank == 1 and step != 1).square().sum().backward()
        with ours.no_sync():
            ours(x, False).sum().backward()
            ours(-x, rank == 1 and step != 1).square().sum().backward()
        before = gradients(ours)
        reduce_gradients(ours)
        after = gradients(ours)
        assert all(tensor is None or after[name] is tensor for name, tensor in before.items())
        assert_same(after, gradients(theirs))
        assert (after["some.weight"] is None) == (step == 1)
        for ddp in (ours, theirs):
            ddp.zero_grad(set_to_none=step == 0)
            for parameter in ddp.module.some.parameters():
                parameter.grad = None


def gradients_have_the_bits_of_the_reducer() -> None:
    for bucket_bytes in (1, 200, 25 * 2**20):  # one bucket each, for some, for all together
        for as_view in (True, False):
            compare_three_steps(bucket_bytes, as_view)


def the_reducer_takes_over_where_we_stopped() -> None:
    rank, theirs, ours = dist.get_rank(), make(), make()
    for step in range(4):
        for ddp in (ours, theirs):
            ddp.zero_grad()
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
        theirs(x, step % 2 == 0).sum().backward()
        if step % 2 == 0:
            with ours.no_sync():
                ours(x, True).sum().backward()
            reduce_gradients(ours)
        else:  # what the step before used is unused here
            ours(x, False).sum().backward()
        assert_same(gradients(ours), gradients(theirs))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 3, sparse=True)
        self.bag = nn.EmbeddingBag(9, 3, sparse=True)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, indices: Tensor, use_bag: bool = True) -> Tensor:
        words = self.words(indices) * self.bias.exp()
        return words + self.bag(indices.view(1, -1) % 9) if use_bag else words


def sparse_gradients_are_refused_on_all_ranks() -> None:
    ddp = DistributedDataParallel(Words())
    with ddp.no_sync():
        ddp(torch.tensor([1, 2]), dist.get_rank() == 1).sum().backward()  # no bag on rank 0
    for embedding in (ddp.module.words, ddp.module.bag):
        message = r"cannot average sparse gradients .* of the parameter \[\d+, 3\]\. Use sparse=False, or a fixed size"
        with pytest.raises(ValueError, match=message):
            reduce_gradients(ddp)
        embedding.weight.grad = None  # on all ranks: then the bag is found, which only rank 1 has used
    reduce_gradients(ddp)


def ignored_parameters_stay_local() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.register_parameter("own", nn.Parameter(torch.ones(2)))  # ignored by its name, not by the reducer
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight", "own"])
    net.forward = lambda x: net[1](net[0](x)) * net.own
    ddp = DistributedDataParallel(net)
    pairs = []
    for reduce in (lambda ddp: None, reduce_gradients):
        ddp.zero_grad()
        with ddp.no_sync() if reduce is reduce_gradients else torch.enable_grad():
            ddp(torch.full((3, 2), dist.get_rank() + 1.0)).sum().backward()
        reduce(ddp)
        pairs.append({name: tensor.clone() for name, tensor in gradients(ddp).items()})
    assert_same(*pairs)


def ranks_may_lay_a_gradient_out_differently() -> None:
    values = torch.arange(24.0).view(1, 2, 3, 4) * (dist.get_rank() + 1)
    tensor = values.to(memory_format=torch.channels_last) if dist.get_rank() == 1 else values.clone()
    averaging.average_dense([tensor], dist.group.WORLD)
    assert torch.equal(tensor, torch.arange(24.0).view(1, 2, 3, 4) * 1.5)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        y = self.norm(x)
        if fails:
            raise torch.OutOfMemoryError("no room")
        return y


def buffers_are_broadcast_once_whatever_fails() -> None:
    rank, theirs, ours = dist.get_rank(), DistributedDataParallel(Normed()), DistributedDataParallel(Normed())
    for step in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2 * step + rank))
        theirs(x).sum().backward()
        sync_buffers(ours)
        sync_buffers(ours)  # once is enough
        saved = copy.deepcopy(dict(ours.named_buffers()))
        with ours.no_sync():
            if rank == 1:  # a try that fails on one rank only
                with pytest.raises(torch.OutOfMemoryError):
                    ours(x, fails=True)
                for name, buffer in ours.named_buffers():
                    buffer.copy_(saved[name])
            ours(x).sum().backward()
        reduce_gradients(ours)
        expect_buffer_sync(ours)
        for name, buffer in ours.named_buffers():
            assert torch.equal(buffer, dict(theirs.named_buffers())[name]), name
    assert ours.will_sync_module_buffers()


def test_two_ranks(tmp_path):
    on_ranks(
        tmp_path,
        gradients_have_the_bits_of_the_reducer,
        the_reducer_takes_over_where_we_stopped,
        sparse_gradients_are_refused_on_all_ranks,
        ignored_parameters_stay_local,
        ranks_may_lay_a_gradient_out_differently,
        buffers_are_broadcast_once_whatever_fails,
    )


def test_what_only_the_reducer_can_do_is_named(one_rank):
    def reason(**options: object) -> str | None:
        return why_reducer_is_needed(DistributedDataParallel(nn.Linear(2, 2), **options))

    assert reason() is None
    assert reason(find_unused_parameters=True, gradient_as_bucket_view=True) is None
    assert reason(static_graph=True) == "static_graph=True, which fails in a first backward under no_sync"
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, fp16_compress_hook)
    assert why_reducer_is_needed(hooked) == "a communication hook"
    built_in = DistributedDataParallel(nn.Linear(2, 2))
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    assert why_reducer_is_needed(built_in) == "a communication hook"


def test_collectives_in_a_forward_are_named(one_rank, monkeypatch):
    mesh = init_device_mesh("cpu", (1,))
    norm = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    assert has_collectives_in_forward(norm) is None  # one rank
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    assert has_collectives_in_forward(norm) == "SyncBatchNorm"
    assert has_collectives_in_forward(norm.eval()) == "SyncBatchNorm"  # may be thawed later
    assert has_collectives_in_forward(norm, is_training=False) is None
    assert has_collectives_in_forward(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None
    monkeypatch.undo()
    sharded = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(sharded[1], mesh=mesh)
    assert has_collectives_in_forward(sharded) == "FSDP2 modules"
    parallel = distribute_module(nn.Linear(2, 2), mesh)
    assert has_collectives_in_forward(parallel) == "DTensor parameters, as of tensor parallelism"
