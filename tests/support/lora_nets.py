"""Adapters on frozen layers, in the shape that ``peft`` gives them, and what trains them."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

VOCAB_SIZE, WIDTH, LENGTH = 96, 64, 8


class LoRA(nn.Module):
    """``base_layer(x)`` and a product of two small layers, which alone are trained."""

    def __init__(self, base_layer: nn.Module, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class ScaledEmbedding(nn.Embedding):
    """As some of transformers have it."""

    def forward(self, indices: Tensor) -> Tensor:
        return super().forward(indices) * self.weight.dtype.itemsize


class LoRANet(nn.Module):
    """Tokens [B, T] to logits [B, T, VOCAB_SIZE]; 64-wide, six frozen layers, two of them with adapters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = ScaledEmbedding(VOCAB_SIZE, width)
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.up, self.down = LoRA(nn.Linear(width, 4 * width)), LoRA(nn.Linear(4 * width, width))
        self.head = nn.Linear(width, VOCAB_SIZE, bias=False)
        for part in (self.embed, self.norm, self.conv, self.head):
            part.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.conv(self.norm(self.embed(tokens)).mT).mT
        return self.head(hidden + self.down(F.gelu(self.up(hidden))))


QUANTIZED = ["embed", "conv", "up.base_layer", "down.base_layer", "head"]
NUM_QUANTIZED = 2 * VOCAB_SIZE * WIDTH + 3 * WIDTH * WIDTH + 2 * 4 * WIDTH * WIDTH


class LitLoRA(pl.LightningModule):
    """Trains adapters on random tokens, fully determined by the seed."""

    def __init__(self, make_net: Callable[[], nn.Module] = LoRANet, num_batches: int = 4) -> None:
        super().__init__()
        self.net = make_net()
        self.num_batches = num_batches

    def training_step(self, batch: Tensor) -> Tensor:
        loss = F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self.training_step(batch))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader:
        draws = torch.Generator().manual_seed(1)
        return DataLoader(torch.randint(VOCAB_SIZE, (4 * self.num_batches, LENGTH + 1), generator=draws), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader


class Saving(pl.Callback):
    """Saves a checkpoint after each epoch, as a run would."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)
