"""A small network whose weights rest on the host, or are sharded on the device, trained on one rank by streams."""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from support.devices import DEVICE
from support.sharded_nets import WIDTH, Net, loss_of, make
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_vram.core.host.transfers import HostWorker
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.private_names.fsdp2 import discard_step, groups_of
from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import plan_sharding_groups

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


@contextlib.contextmanager
def late_threads() -> Iterator[None]:
    """Threads of the host begin each job late."""

    def submit(worker: HostWorker, job: Callable[[], None]) -> Any:
        return begin(worker, lambda: (time.sleep(0.01), job())[1])

    begin, HostWorker.submit = HostWorker.submit, submit  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        HostWorker.submit = begin  # type: ignore[method-assign]


def sgd(network: Any, host: HostOptimizers) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    host.attach([optimizer])
    return optimizer


def _steps(
    *,
    is_low_precision: bool = False,
    is_evaluated: bool = False,
    num_backwards: int = 1,
    prepare: Any = None,
    **options: Any,
) -> list[Tensor]:
    data = batches()
    if is_low_precision:
        options |= {"low_precision_dtype": torch.bfloat16, "low_precision": NARROW}
    with trained(**options) as (network, host):
        optimizer = sgd(network, host)
        if prepare is not None:
            prepare(network)
        for batch in data:
            optimizer.zero_grad()
            for _ in range(num_backwards):
                with torch.autocast(DEVICE, torch.bfloat16, enabled=is_low_precision):
                    loss = loss_of(network, batch)
                loss.backward()
            if is_evaluated:
                with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=is_low_precision):
                    network(batch)
            optimizer.step()
        host.finish()
        return shards(network)


def on_the_host() -> list[Tensor]:
    return _steps()


def on_the_host_with_late_threads() -> list[Tensor]:
    with late_threads():
        return _steps()


def resident() -> list[Tensor]:
    return _steps(is_resident=True)


def evaluated_before_the_step() -> list[Tensor]:
    """Weights are fetched after the backward, and the step goes on beside that forward."""
    return _steps(is_evaluated=True)


def resident_evaluated_before_the_step() -> list[Tensor]:
    return _steps(is_evaluated=True, is_resident=True)


def on_the_device() -> list[Tensor]:
    """Gradients are added up on the stream that reduces them."""
    return _steps(on_host=False, pin_memory=False, num_backwards=2)


def _set_hooks(network: Any) -> None:
    for parameter in network.blocks.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)


def hooks_on_gradients() -> list[Tensor]:
    """The host changes gradients as they come."""
    return _steps(prepare=_set_hooks)


def fetched_and_written() -> list[Tensor]:
    """The shards of a flat_shard are written as soon as it allows that."""
    with trained() as (_, host):
        flat_shard = host._sharding.groups[0].flat_shards[0]
        flat = torch.cat(list(flat_shard.fetch()))
        flat_shard.wait_for_copies()
        flat_shard.shards.fill_(9)
        return [flat.cpu()]


def fetched_twice() -> list[Tensor]:
    """Shards are written, and their narrow copy is made again."""
    with trained(low_precision_dtype=torch.bfloat16, low_precision=NARROW) as (_, host):
        flat_shard = next(
            flat_shard
            for group in host._sharding.groups
            for flat_shard in group.flat_shards
            if flat_shard.has_low_precision
        )
        first = torch.cat(list(flat_shard.fetch()))
        flat_shard.shards.fill_(9)
        flat_shard.touch()
        second = torch.cat(list(flat_shard.fetch()))
        return [first.float().cpu(), second.float().cpu()]


def written_between_forwards() -> list[Tensor]:
    """A user writes to weights after a forward that nobody has waited for, as an average of weights does."""
    data = batches()
    with trained() as (network, _), torch.no_grad():
        outputs = []
        for batch in data:
            outputs.append(network(batch))
            for parameter in network.parameters():
                parameter.mul_(0.5)
        return [output.cpu() for output in outputs]


def finished() -> list[Tensor]:
    """Shards are looked at past all that waits for steps."""
    with late_threads(), trained() as (network, host):
        optimizer = sgd(network, host)
        loss_of(network, batches()[0]).backward()
        optimizer.step()
        host.finish()
        return [flat_shard.shards.clone() for group in host._sharding.groups for flat_shard in group.flat_shards]


def held_beside_a_step() -> list[Tensor]:
    """A user got hold of a shard while one beside it was stepped, and writes to it past all counters afterwards."""
    data, outputs = batches(), []
    with late_threads(), trained(low_precision_dtype=torch.bfloat16, low_precision=NARROW) as (network, host):
        optimizer = torch.optim.SGD([block.up.weight for block in network.blocks], lr=0.5)
        host.attach([optimizer])
        for batch in data:
            optimizer.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = loss_of(network, batch)
            loss.backward()
            outputs.append(loss.detach().cpu())
            optimizer.step()
            held = [local(block.down.weight).data for block in network.blocks]
            host.finish()
            for shard in held:
                shard.mul_(0.5)
    return outputs


def removed_after_a_step_that_failed() -> list[Tensor]:
    """Whoever finishes steps hears of the error; weights become whole all the same."""
    weights: list[Tensor] = []
    with contextlib.suppress(TypeError), late_threads(), trained() as (network, host):
        optimizer = sgd(network, host)
        loss_of(network, batches()[0]).backward()
        optimizer.step()  # one that may make states has ended when it returns
        loss_of(network, batches()[1]).backward()
        optimizer.param_groups[0]["lr"] = None
        optimizer.step()
        host._sharding.remove()
        weights = [parameter.detach().cpu() for parameter in network.parameters()]
    return weights


def discarded() -> list[Tensor]:
    """After a backward that failed the gradients that FSDP2 has sent are written by the caller."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError

    with _ranks((1,)) as mesh:
        network = make()
        for part in (*network.blocks, network):
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy())
        network.blocks[1].register_forward_hook(lambda part, given, output: output.register_hook(fail) and None)
        with contextlib.suppress(ArithmeticError):
            loss_of(network, batches()[0]).backward()
        parts = [part for part in network.modules() if isinstance(part, FSDPModule)]
        for parameter in (p for part in parts for group in groups_of(part) for p in group.fsdp_params):
            discard_step(parameter)
        gradients = [local(parameter.grad) for parameter in network.parameters() if parameter.grad is not None]
        for gradient in gradients:
            gradient.zero_()
        torch.accelerator.synchronize()
        return [gradient.clone() for gradient in gradients]
