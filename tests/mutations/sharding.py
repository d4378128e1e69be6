"""A small network whose weights rest on the host, or are sharded on the device, trained on one rank by streams."""

import contextlib
import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.devices import DEVICE
from support.sharded_nets import WIDTH, Net, loss_of, make
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_vram.core.host.worker import HostWorker
from lightning_vram.optimizers.on_host.optimizers import HostOptimizers
from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping.plan import plan_sharding_groups

NUM_STEPS = 3
NARROW = [f"blocks.{index}.{name}.weight" for index in range(3) for name in ("up", "down")]
BACKENDS = {"cuda": "nccl", "sim": "simccl"}


@contextlib.contextmanager
def _ranks(shape: tuple[int, ...]) -> Generator[DeviceMesh, None, None]:
    backend = f"cpu:gloo,{DEVICE}:{BACKENDS[DEVICE]}"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh(DEVICE, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def trained(shape: tuple[int, ...] = (1,), net: Any = Net, **options: Any) -> Iterator[tuple[Any, HostOptimizers]]:
    """A network, and who steps it; nobody waits for the device when it ends."""
    with _ranks(shape) as mesh:
        network = make(net)
        plan = plan_sharding_groups(network, min_params=100)
        sharding = FullSharding(network, mesh, plan, ShardingOptions(**{"pin_memory": True, **options}))
        host = HostOptimizers(sharding, num_threads=1)
        try:
            yield network, host
            host.finish()
        finally:
            with contextlib.suppress(Exception):
                host.let_go(sharding.remove(make_whole=False))


def batches() -> Tensor:
    """On the device from the start: bringing one there would wait for it."""
    return torch.randn(NUM_STEPS, 4, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def shards(network: Any) -> list[Tensor]:
    return [local(parameter.detach()).cpu().clone() for parameter in network.parameters()]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _steps(**options: Any) -> list[Tensor]:
    data = batches()
    with trained(**options) as (network, host):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
        host.attach([optimizer])
        for batch in data:
            optimizer.zero_grad()
            loss_of(network, batch).backward()
            optimizer.step()
        host.finish()
        return shards(network)


def weights_on_the_host() -> list[Tensor]:
    return _steps()


def weights_with_a_resident_copy() -> list[Tensor]:
    return _steps(is_resident=True)


def weights_on_the_device() -> list[Tensor]:
    return _steps(on_host=False, pin_memory=False)


def replicas() -> list[Tensor]:
    """Gradients are reduced on one stream and sent on another."""
    return _steps(shape=(1, 1))
