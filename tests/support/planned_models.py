"""Models that are planned for."""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_vram.demos import ByteGPT


class LitGPT(ByteGPT):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__(num_layers=num_layers, width=64, num_heads=2, sequence_length=64)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randint(256, (16, 65), generator=torch.Generator().manual_seed(0)), batch_size=8)

    val_dataloader = train_dataloader


class Wide(pl.LightningModule):
    """Weights are most of it: 192 MiB, with gradients and states 768 MiB."""

    def __init__(self, width=2048):
        super().__init__()
        with torch.device("meta"):
            self.net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(12)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
