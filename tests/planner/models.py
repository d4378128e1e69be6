"""A model that is planned for."""

import lightning.pytorch as pl
import torch


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
