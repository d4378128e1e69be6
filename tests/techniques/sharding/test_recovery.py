"""FSDP2 models after a failed forward or backward: the next one gives what it would have given."""

import gc
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support.sharded_nets import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from lightning_vram.private_names.fsdp2 import groups_of
from lightning_vram.techniques.sharding import can_recover, discard_failed_iteration

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
needs_recovery = pytest.mark.skipif(not can_recover(), reason="needs torch 2.13")
WIDTH = 6


class Fuse(torch.autograd.Function):
    """Passes on, and blows where it was told to."""

    blows_in = ""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        Fuse.blow("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        Fuse.blow("backward")
        return gradient

    @classmethod
    def blow(cls, where: str) -> None:
        if cls.blows_in == where:
            raise torch.OutOfMemoryError("no room")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.has_fuse = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).tanh()
        return x + self.down(Fuse.apply(hidden) if self.has_fuse else hidden)


@dataclass(frozen=True)
class How:
    reshard: bool = True
    parts: bool = False
    dtype: torch.dtype = torch.float64
    is_wrapped: bool = False
    num_before: int = 0


def build(how: How) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(4))).double()
    blocks[1].has_fuse = True
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=how.dtype, reduce_dtype=torch.float64)
    options = {"mesh": mesh, "reshard_after_forward": how.reshard, "mp_policy": policy}
    for block in blocks:
        for layer in (block.up, block) if how.parts else (block,):
            fully_shard(layer, **options)
    if how.is_wrapped:  # each block is a root of its own, as in a LightningModule that shards its networks
        return nn.Sequential(blocks, nn.Linear(WIDTH, WIDTH).double())
    fully_shard(blocks, **options)
    return blocks


def run(model: nn.Module, batch: int) -> None:
    seed = 10 * batch + dist.get_rank()
    x = torch.randn(3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    model(x).double().square().sum().backward()


def fail(model: nn.Module, where: str) -> None:
    Fuse.blows_in = where
    try:
        with pytest.raises(torch.OutOfMemoryError):
            run(model, batch=7)
    finally:
        Fuse.blows_in = ""


def shards(model: nn.Module) -> dict[str, Tensor]:
    """Gradients, by the shards of this rank."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: getattr(grad, "to_local", lambda grad=grad: grad)().clone() for name, grad in found.items()}


def sharded_parameters(model: nn.Module) -> list[FSDPParam]:
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    return [parameter for part in parts for group in groups_of(part) for parameter in group.fsdp_params]


def gathered_bytes(model: nn.Module) -> int:
    return sum(tensor.untyped_storage().nbytes() for p in sharded_parameters(model) for tensor in p.all_gather_outputs)


def recover(how: How, where: str) -> None:
    expected, model = build(how), build(how)
    for batch in range(how.num_before):
        run(expected, batch)
        run(model, batch)
    run(expected, batch=5)
    saved = {name: parameter.grad for name, parameter in model.named_parameters()}
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        fail(model, where)
        discard_failed_iteration(model)
        assert gathered_bytes(model) == 0
        assert all(p._unsharded_param.grad is None for p in sharded_parameters(model) if hasattr(p, "_unsharded_param"))
    for parameter in model.parameters():
        parameter.grad = None
    run(model, batch=5)
    for name, parameter in model.named_parameters():
        if saved[name] is not None:
            parameter.grad += saved[name]
    actual = shards(model)
    assert actual.keys() == shards(expected).keys()
    for name, gradient in shards(expected).items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=1e-12, msg=name)


HOWS = {
    "whole layers": How(),
    "kept after the forward": How(reshard=False),
    "kept parts": How(parts=True, reshard=False, num_before=1),
    "mixed precision": How(dtype=torch.float32, num_before=1),
    "several roots": How(is_wrapped=True, parts=True),
}


@pytest.mark.quick_sample(3)
@needs_recovery
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_gradients_are_those_without_a_failure(tmp_path, world_size, how, where):
    def check() -> None:
        recover(HOWS[how], where)

    on_ranks(tmp_path, check, num_ranks=world_size)


@needs_recovery
@pytest.mark.parametrize("is_first", [True, False], ids=["the first time", "later"])
def test_memory_that_runs_out_while_a_layer_is_gathered_is_given_back(one_rank, monkeypatch, is_first):
    model = build(How())
    if not is_first:
        run(model, batch=0)
        model.zero_grad()
    name = "init_all_gather_outputs" if is_first else "init_unsharded_param"
    real, victim = getattr(FSDPParam, name), sharded_parameters(model)[5]

    def run_out(self: FSDPParam, *args: object) -> None:
        if self is victim:
            raise torch.OutOfMemoryError("no room")
        real(self, *args)

    monkeypatch.setattr(FSDPParam, name, run_out)
    with pytest.raises(torch.OutOfMemoryError):
        run(model, batch=1)
    monkeypatch.undo()
    assert gathered_bytes(model) > 0
    discard_failed_iteration(model)
    assert gathered_bytes(model) == 0
    expected = build(How())
    for each in (model, expected):
        each.zero_grad()
        run(each, batch=1)
    assert all(torch.equal(gradient, shards(expected)[name]) for name, gradient in shards(model).items())


@needs_recovery
def test_nothing_of_the_failed_graph_stays_alive(one_rank):
    model = build(How())
    run(model, batch=0)
    model.zero_grad()
    gc.collect()
    before = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    for where in ("forward", "backward") * 3:
        fail(model, where)
        discard_failed_iteration(model)
        model.zero_grad()
    gc.collect()
    assert sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()) <= before
