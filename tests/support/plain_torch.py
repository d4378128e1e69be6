"""Plain PyTorch, in an environment without Lightning: four techniques together train to the bit as none does.

Prints what came out. Started as a program of its own, so it imports nothing of the tests.
"""

import importlib.util
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_vram
from lightning_vram import SavePolicy, track_memory
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.techniques.activation_checkpointing import apply_activation_checkpointing
from lightning_vram.techniques.activation_compression import CompressionStage
from lightning_vram.techniques.activation_offload import ActivationOffloading
from lightning_vram.techniques.sharding import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import plan_sharding_groups

NUM_STEPS = 3
WITHOUT = ("lightning", "pytorch_lightning", "torchmetrics", "jsonargparse", "omegaconf", "rich")


def make_net() -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)) for _ in range(3))
    return nn.Sequential(*blocks)


def loss_of(net: nn.Module, step: int) -> Tensor:
    torch.manual_seed(step)
    return net(torch.randn(4, 8)).square().mean()


def train_plainly() -> list[Tensor]:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    for step in range(NUM_STEPS):
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def train_with_techniques() -> list[Tensor]:
    net = make_net()
    layers = apply_activation_checkpointing(net, layers="1", save=SavePolicy("matmuls"))
    mesh = dist.init_device_mesh("cpu", (1,))
    sharding = FullSharding(net, mesh, plan_sharding_groups(net, min_params=100), ShardingOptions())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    host = HostOptimizers(sharding, num_threads=1)
    host.attach([optimizer])
    offloading = ActivationOffloading(net, min_offload_bytes=1)
    for step in range(NUM_STEPS):
        with offloading, CompressionStage(min_bytes=1):
            loss = loss_of(net, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert offloading.report.offloaded_bytes > 0
    offloading.close()
    host.finish()
    host.let_go(sharding.remove())  # the parameters are whole again
    layers.remove()
    return [parameter.detach() for parameter in net.parameters()]


def main() -> None:
    assert [name for name in WITHOUT if importlib.util.find_spec(name) is not None] == []
    names = ["DeviceSpec", "SavePolicy", "configure_allocator", "load_quantized", "track_memory"]
    assert sorted(lightning_vram.__all__) == names
    try:
        from lightning_vram import MicroBatching  # noqa: F401
    except ImportError as error:
        sys.stdout.write(f"{error}\n")
    assert not hasattr(lightning_vram, "NoSuchName")
    net = make_net()
    with track_memory(net) as tracker:
        loss_of(net, 0).backward()
    assert tracker.timeline.saved_for_backward_bytes > 0
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    expected, actual = train_plainly(), train_with_techniques()
    dist.destroy_process_group()
    assert HostOptimizers.__module__ in sys.modules
    assert [name for name in sys.modules if name.partition(".")[0] in WITHOUT] == []
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))
    sys.stdout.write("equal\n")


if __name__ == "__main__":
    main()
