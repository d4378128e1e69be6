"""A small network with everything that makes checkpoints hard, its optimizers, and processes to shard it over."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.sharded_nets import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.optim import SGD, AdamW, Optimizer

from lightning_vram.optimizers.moment_forms import is_elementwise
from lightning_vram.techniques.sharded_checkpoints import CheckpointStore

WIDTH = 6


class Block(nn.Module):
    """Three rows: fewer than four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 3), nn.BatchNorm1d(3), nn.Linear(3, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).tanh())


class Net(nn.Module):
    """Tied weights, buffers, a number for a parameter, a frozen layer, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, 5)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.note = {"seen": 0}

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.frozen(self.blocks(self.embed(tokens)))) * self.scale

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.note)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = dict(state)


def make_net(seed: int = 0, *, sharded: bool = True, compiled: bool = False) -> Net:
    torch.manual_seed(seed)
    net = Net()
    if compiled:
        net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    if sharded:
        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        for block in net.blocks:
            fully_shard(block, **options)
        fully_shard(net, ignored_params={net.scale}, **options)
    return net


def make_adamw(net: nn.Module) -> Optimizer:
    """Two groups, whose parameters take turns in the module."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1 and p.requires_grad]
    # the loop over single tensors goes with plain ones beside sharded ones
    return AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}], 1e-2, foreach=False)


def make_sgd(net: nn.Module) -> Optimizer:
    return SGD(net.parameters(), 0.1, foreach=False)


def train(net: nn.Module, optimizer: Optimizer, num_steps: int = 1, first: int = 0) -> float:
    """Take steps with the same batch on every rank; returns the last loss before its step."""
    net.train()
    for step in range(first, first + num_steps):
        torch.manual_seed(step)
        loss = nn.functional.cross_entropy(net(torch.randint(5, (8,))), torch.randint(5, (8,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if hasattr(net, "note"):
        net.note["seen"] += num_steps
    return loss.item()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run_ranks(world_size: int, work: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Call ``work(folder, *arguments)`` in forked processes of a group; an error in any is an error here."""
    on_ranks(folder, partial(work, folder, *arguments), num_ranks=world_size)


def load(
    store: CheckpointStore,
    path: str | Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into a module and its optimizers; returns the rest."""
    checkpoint = store.open(path, weights_only=weights_only)
    store.load_module(checkpoint, module, strict=strict)
    if optimizers:
        store.load_optimizers(checkpoint, module, optimizers, is_elementwise)
    return {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}


def read_folder(
    folder: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool, weights_only: bool | None = None
) -> dict[str, Any]:
    store = CheckpointStore(sharded=True, asynchronous=False)
    return load(store, folder, module, optimizers, strict=strict, weights_only=weights_only)
