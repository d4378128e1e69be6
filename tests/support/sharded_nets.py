"""Small networks that are sharded, beside the same ones trained plainly."""

import gc
import os
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.flat_shards import FlatShard
from lightning_vram.techniques.sharding.grouping import plan_sharding_groups

WIDTH = 6
NUM_BLOCKS = 3


class Apart(FullSharding):
    """Keeps shards where they are at home on the same CPU, under another name: as if the device were a GPU."""

    home = property(lambda self: torch.device("cpu", 0), lambda self, home: None)


MODES: dict[str, tuple[type[FullSharding], dict[str, Any]]] = {
    "params": (FullSharding, {}),
    "params apart": (Apart, {}),
    "optimizer": (FullSharding, {"is_resident": True}),
    "optimizer apart": (Apart, {"is_resident": True}),
    "none": (FullSharding, {"on_host": False}),
    "half apart": (Apart, {"device_bytes": 0.5}),  # copies of all, and some groups on the device
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Some blocks, a head in a group of its own, a norm in the root: [B, WIDTH] -> [B, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(kind: Callable[[], nn.Module] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


@contextmanager
def sharded(net: nn.Module, mode: str = "params", **options: Any) -> Generator[FullSharding, None, None]:
    kind, given = MODES[mode]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = plan_sharding_groups(net, min_params=100)
    sharding = kind(net, mesh, plan, ShardingOptions(**{**given, **options}))
    try:
        yield sharding
    finally:
        if any(isinstance(part, FSDPModule) for part in net.modules()):  # nobody has removed it
            sharding.remove()


@contextmanager
def hosted(net: nn.Module, mode: str = "params", **options: Any) -> Generator[HostOptimizers, None, None]:
    """Shard ``net`` for a while, and step what is attached on its shards."""
    with sharded(net, mode, **options) as sharding:
        host = HostOptimizers(sharding, num_threads=1)
        try:
            yield host
            host.finish()
        finally:
            host.let_go(sharding.remove())


def host_bytes_of(sharding: FullSharding) -> int:
    """Host memory of shards and their copies for transfers, on this rank."""
    groups = (group for group in sharding.groups if group.landing is not None)
    return sum(host_bytes_of_flat(flat) for group in groups for flat in group.flat_shards)


def host_bytes_of_flat(flat: FlatShard) -> int:
    return sum(tensor.nbytes for tensor in (flat.shards, flat._low_precision, flat.split) if tensor is not None)


def batch(seed: int, size: int = 4) -> Tensor:
    """Inputs, [B, WIDTH]; every rank has the same."""
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))


def part(x: Tensor) -> Tensor:
    """What of a batch this rank computes."""
    return x.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else x


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).float().square().mean()


def take_step(net: nn.Module, optimizer: Optimizer, seed: int = 0) -> Tensor:
    """One step on a batch that all ranks share, which is computed in parts if ``net`` is sharded."""
    x = batch(seed)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in net.parameters())
    optimizer.zero_grad()
    loss = loss_of(net, part(x) if is_sharded else x)
    loss.backward()
    optimizer.step()
    return loss.detach()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like_shard(value: Tensor, shard: Tensor) -> Tensor:
    """What may be copied to ``shard``."""
    return distribute_tensor(value, shard.device_mesh, shard.placements) if isinstance(shard, DTensor) else value


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter).detach().clone() for name, parameter in net.named_parameters()}


def gradients(net: nn.Module) -> dict[str, Tensor]:
    named = [(name, parameter.grad) for name, parameter in net.named_parameters()]
    return {name: whole(gradient).clone() for name, gradient in named if gradient is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, rtol=10 * tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def _run_rank(rank: int, path: str, num_ranks: int, checks: tuple[Callable[..., None], ...]) -> None:
    gc.freeze()  # what the parent left belongs to its process groups, which cannot be ended here
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", category=UserWarning)  # of FSDP2
    dist.init_process_group("gloo", store=dist.FileStore(path, num_ranks), rank=rank, world_size=num_ranks)
    for check in checks:
        try:
            check()
        except BaseException as error:
            error.add_note(f"in {getattr(check, '__name__', check)} on rank {rank}")
            raise
        dist.barrier()
    dist.destroy_process_group()


def on_ranks(path: Path, *checks: Callable[[], None], num_ranks: int = 2) -> None:
    gc.collect()
    store = f"{path}/store-{os.urandom(4).hex()}"
    mp.start_processes(_run_rank, (store, num_ranks, checks), nprocs=num_ranks, start_method="fork")
