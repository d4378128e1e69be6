"""Models for ``fsdp_offload`` in the Trainer, whose plain runs use the optimizer kernels that it uses."""

import gc
import os
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.helpers import BATCH_SIZE, LitTiny, TinyCNN, TinyGPT
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

MODES = {
    "params": {},
    "optimizer": {"offload": "optimizer"},
    "none": {"offload": "none"},
    "half": {"device_bytes": 0.5},  # copies of all weights, and some groups on the device
    "grad_op": {"shard": "grad_op"},
    "all in the root": {"min_params": 1_000_000},
}


def leave_group() -> None:
    """Forget the process group of a run on one rank: runs on forked ranks would take it, or its port, for theirs."""
    if dist.is_initialized():
        dist.destroy_process_group()  # our own waits a moment for threads, which only an end of Python needs
    os.environ.pop("MASTER_PORT", None)
    gc.collect()


def adamw(parameters: object, lr: float = 1e-3) -> AdamW:
    # eps: the gradient of attention's key bias is rounding noise, of which AdamW would make whole steps
    return AdamW(parameters, lr, fused=True, eps=1e-5)  # type: ignore[arg-type]


class Fused(LitTiny):
    def __init__(self, net: TinyCNN | TinyGPT | None = None) -> None:
        super().__init__(TinyGPT() if net is None else net)
        self.seen: list[object] = []

    def configure_optimizers(self) -> AdamW:
        return adamw(self.parameters())


class FusedCNN(Fused):
    def __init__(self) -> None:
        super().__init__(TinyCNN())


class Split(Fused):
    """Without dropout; each of several ranks takes its part of every batch."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(1)  # Lightning sets the seed again where there are several ranks
        return super().train_dataloader()

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return super().loss([part[self.trainer.global_rank :: self.trainer.world_size] for part in batch])


class Odd(Fused):
    """Parameters of its own, a scalar among them, a frozen layer and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(17))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Linear(20, 20)
        self.frozen = nn.Linear(17, 17).requires_grad_(requires_grad=False)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        logits = self.net(batch[0])
        logits = (logits + self.frozen(logits) + self.bias) * self.scale
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


class GAN(Fused):
    """Two optimizers that take turns, steps and forwards within a training step, parameters outside of layers."""

    algorithm = "norm"

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.small = nn.Linear(8, 2)
        self.scale = nn.Parameter(torch.ones(8))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def fake(self, noise: Tensor) -> Tensor:
        return self.generator(noise) * self.scale * self.temperature

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()
        real, noise = batch
        self.toggle_optimizer(critic)
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(self.fake(noise).detach())).mean()
        self.manual_backward(loss + self.small(real).square().mean())
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        for _ in range(2):
            loss = F.softplus(-self.critic(self.fake(noise))).mean()
            generator.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(generator, gradient_clip_val=0.1, gradient_clip_algorithm=self.algorithm)
            generator.step()
        self.untoggle_optimizer(generator)
        self.seen.append(loss.item())
        with torch.no_grad():
            self.seen.append(self.fake(noise).sum().item())

    def configure_optimizers(self) -> tuple[AdamW, AdamW]:
        return (
            adamw([*self.generator.parameters(), self.scale, self.temperature]),
            adamw([*self.critic.parameters(), *self.small.parameters()]),
        )

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(1)
        return DataLoader(TensorDataset(torch.randn(16, 8), torch.randn(16, 4)), batch_size=BATCH_SIZE)

    validation_step = pl.LightningModule.validation_step
    val_dataloader = pl.LightningModule.val_dataloader
