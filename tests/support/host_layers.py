"""A module for ``fsdp_offload``, and the bytes of the host that its training takes."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from support.sharded_nets import host_bytes_of
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from lightning_vram.private_names.fsdp2 import own_shard_of
from lightning_vram.techniques.sharding.parameter import low_precision_of

ADAMW = partial(AdamW, lr=1e-2)


class Layers(pl.LightningModule):
    """Linear layers only, all of which travel in 16 bit."""

    def __init__(self, optimizer: Any = ADAMW, *, num_batches: int = 50) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 400), nn.Tanh(), nn.Linear(400, 30), nn.Tanh(), nn.Linear(30, 4))
        self.optimizer, self.num_batches = optimizer, num_batches
        self.host_bytes: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch.chunk(self.trainer.world_size)[self.trainer.global_rank]).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([p for p in self.parameters() if p.requires_grad])

    def train_dataloader(self) -> DataLoader:
        data = torch.randn(8 * self.num_batches, 16, generator=torch.Generator().manual_seed(1))
        return DataLoader(data, batch_size=8)


def host_bytes(module: pl.LightningModule) -> int:
    """All that is kept on the host for the module's parameters, by storages; waits for the step first."""
    module.trainer.strategy._finish_steps()
    sharding = module.trainer.strategy._sharding
    found: dict[int, int] = {}

    def count(tensor: Any) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        storage = getattr(local, "records", local).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()

    for optimizer in module.trainer.optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if value.dim():
                    count(value)
    gradients = 0
    for parameter in sharding.shards.values():
        narrow = low_precision_of(parameter.grad)
        if parameter.grad is not None:
            gradients += (own_shard_of(parameter.grad) if narrow is None else narrow).nbytes
    return host_bytes_of(sharding) + gradients + sum(found.values())


def exceptions(module: pl.LightningModule) -> int:
    flat_shards = [flat_shard for group in module.trainer.strategy._sharding.groups for flat_shard in group.flat_shards]
    return sum(
        flat_shard.split.nbytes - 4 * flat_shard.numel for flat_shard in flat_shards if flat_shard.split is not None
    )


class Loaded(Layers):
    def on_train_start(self) -> None:
        states = self.trainer.optimizers[0].state.values()
        self.moments = [state["exp_avg"].clone() for state in states]
