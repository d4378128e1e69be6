"""Saving and resuming take no more of the device than the states, by Lightning's own plugin and by ours."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from support.devices import ACCELERATOR, allocate_workspaces, device_module, free_workspaces
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram.checkpoint_io import StreamedCheckpointIO

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
]
STATE_BYTES = 3 * 4 * 4 * 512 * 512  # weights and Adam's two states of four layers, in float32


class Layers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
        self.peak_bytes = 0

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def train_dataloader(self):
        return DataLoader(torch.ones(2, 512), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def setup(self, stage):
        free_workspaces()  # else Lightning does, after this hook: room where the states would not show
        device_module().reset_peak_memory_stats()
        self.before = device_module().memory_allocated()

    def on_train_start(self):
        self.peak_bytes = device_module().max_memory_allocated() - self.before


class SavesAfterABatch(pl.Callback):
    peak_bytes = 0

    def on_train_start(self, trainer, pl_module):
        before = device_module().memory_allocated()
        allocate_workspaces()  # which the batch would
        pl_module.before += device_module().memory_allocated() - before

    def on_train_batch_end(self, trainer, pl_module, *args):
        trainer.optimizers[0].zero_grad()
        device_module().reset_peak_memory_stats()
        trainer.save_checkpoint(f"{trainer.default_root_dir}/x.ckpt")
        self.peak_bytes = device_module().max_memory_allocated() - pl_module.before


@pytest.mark.parametrize("plugin", [TorchCheckpointIO, StreamedCheckpointIO])
def test_saving_and_resuming_peak_at_the_states(fit, tmp_path, plugin):
    options = {"accelerator": ACCELERATOR, "devices": 1, "max_epochs": -1, "plugins": [plugin()]}
    saves = SavesAfterABatch()
    fit(Layers, saves, max_steps=1, **options)
    resumed = fit(Layers, max_steps=2, ckpt_path=tmp_path / "x.ckpt", **options)
    assert STATE_BYTES <= saves.peak_bytes <= 1.1 * STATE_BYTES
    assert STATE_BYTES <= resumed.peak_bytes <= 1.1 * STATE_BYTES
