"""Memory that really runs out is explained, and a part from the page helps."""

import gc
import re

import lightning.pytorch as pl
import pytest
import torch
from support.devices import ACCELERATOR, DEVICE, at_size, device_module
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, VRAMMonitor
from lightning_vram.memory.device.accelerators import ProcessLimit
from lightning_vram.memory.units import MIB

pytestmark = pytest.mark.device
BATCH_SIZE, WIDTH, NUM_LAYERS = at_size((16384, 256, 12), (4096, 128, 8))


class LitWide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.net = nn.Sequential(*(nn.Sequential(*blocks) for _ in range(NUM_LAYERS)))
        self.kept: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(2 * BATCH_SIZE, WIDTH), batch_size=BATCH_SIZE)


class LitLeaks(LitWide):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(self.net(batch).detach())
        return loss

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(200 * BATCH_SIZE, WIDTH), batch_size=BATCH_SIZE)


def fit(make_trainer, module, *callbacks, limit_bytes=None, folder="."):
    """Return the most that was reserved."""
    gc.collect()
    device_module().empty_cache()
    device_module().reset_peak_memory_stats()
    trainer = make_trainer(
        callbacks=[*callbacks], accelerator=ACCELERATOR, devices=1, max_epochs=1, default_root_dir=folder
    )
    limit = None if limit_bytes is None else ProcessLimit(torch.device(DEVICE, 0), limit_bytes)
    try:
        trainer.fit(module)
    finally:
        if limit is not None:
            limit.remove()
    return device_module().max_memory_reserved()


def test_a_step_that_is_too_large(make_trainer, tmp_path):
    plain_bytes = fit(make_trainer, LitWide())
    least_bytes = fit(make_trainer, LitWide(), ActivationCheckpointing())
    limit_bytes = (plain_bytes + least_bytes) // 2
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(make_trainer, LitWide(), VRAMMonitor(), limit_bytes=limit_bytes, folder=tmp_path)
    page = (tmp_path / "out_of_memory.md").read_text()
    assert page.startswith("# Out of memory: the batch is too large: saved activations\n")
    assert re.search(r"\| asked for \| \d", page)
    assert "| activations |" in page
    assert re.search(r"^\| \* \d .* exact \| `callbacks=\[Activation.*?\)\]` \|$", page, re.MULTILINE)
    assert "What helps: `callbacks=[Activation" in caught.value.__notes__[-1]
    del caught
    assert fit(make_trainer, LitWide(), ActivationCheckpointing(), limit_bytes=limit_bytes) <= limit_bytes


def test_a_leak(make_trainer, tmp_path):
    limit_bytes = fit(make_trainer, LitWide()) + 40 * at_size(BATCH_SIZE * WIDTH * 4, MIB)
    with pytest.raises(torch.OutOfMemoryError):
        fit(make_trainer, LitLeaks(), VRAMMonitor(), limit_bytes=limit_bytes, folder=tmp_path)
    page = (tmp_path / "out_of_memory.md").read_text()
    assert page.startswith("# Out of memory: a memory leak: memory grew with each batch\n")
