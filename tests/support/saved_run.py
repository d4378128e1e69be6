"""A run whose files were saved before modules were moved, and what made them.

With a checkout of commit 7b66c8f: ``PYTHONPATH=CHECKOUT python tests/support/saved_run.py tests/saved_by_0_1``.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, LeanMixedPrecision, MicroBatching, SavePolicy, VRAMMonitor

NUM_STEPS = 4
SAVED_AFTER = 2


class SavedModule(pl.LightningModule):
    """Linear layers, and norms of two kinds."""

    def __init__(self, save: SavePolicy) -> None:
        super().__init__()
        self.save_hyperparameters()
        blocks = (nn.Sequential(nn.Linear(8, 8), norm, nn.GELU()) for norm in (nn.LayerNorm(8), nn.RMSNorm(8)))
        self.net = nn.Sequential(*blocks, nn.Linear(8, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def inputs() -> Tensor:
    """Four batches of four."""
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class SavesWhole(pl.Callback):
    """The network, as it is in the midst of a run, and what it computes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == SAVED_AFTER:
            torch.save(pl_module.net, self.folder / "module.pt")
            trainer.save_checkpoint(self.folder / "run.pt")


def train(*, save_in: Path | None = None, ckpt_path: Path | None = None) -> SavedModule:
    """Train with float32 modules, norms in 16 bits, checkpointed layers and a scaler."""
    torch.manual_seed(0)
    module = SavedModule(SavePolicy("matmuls"))
    callbacks = [VRAMMonitor(), MicroBatching(2), ActivationCheckpointing(layers="net.1", save=module.hparams["save"])]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        plugins=[LeanMixedPrecision("fp16", fp32_modules="net.0.0", low_precision_norms=True)],
        callbacks=[*callbacks, *([SavesWhole(save_in)] if save_in is not None else [])],
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
    )
    trainer.fit(module, DataLoader(inputs(), batch_size=4), ckpt_path=ckpt_path, weights_only=False)
    return module


def compute(net: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """What it gives in autocast, and the gradients."""
    with torch.autocast("cpu", torch.float16):
        output = net(inputs())
        output.float().square().mean().backward()
    return output.detach(), [parameter.grad for parameter in net.parameters()]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    train(save_in=folder)
    torch.save(train(ckpt_path=folder / "run.pt").state_dict(), folder / "end.pt")
    torch.save(compute(torch.load(folder / "module.pt", weights_only=False)), folder / "computed.pt")
