"""A model that is planned for."""

import torch
from torch.utils.data import DataLoader

from lightning_vram.demos import ByteGPT


class LitGPT(ByteGPT):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__(num_layers=num_layers, width=64, num_heads=2, sequence_length=64)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randint(256, (16, 65), generator=torch.Generator().manual_seed(0)), batch_size=8)

    val_dataloader = train_dataloader
