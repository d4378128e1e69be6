"""Run by torchrun in test_strategy_restarts.py: trains, and kills one of its ranks in the first attempt.

Arguments: folder for checkpoints, and their kind.
"""

import os
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

NUM_STEPS = 6


class Regression(pl.LightningModule):
    """Every epoch is one batch: Lightning resumes in the midst of an epoch with the first samples of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4, 16, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)


class KillInStep(pl.Callback):
    """Rank 1 dies in the midst of training, after the checkpoint of step 2."""

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: object) -> None:
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_first and trainer.global_rank == 1 and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path, kind: str) -> None:
    """Fit, from the last checkpoint if there is one, and let rank 0 write down how it went."""
    last = folder / "last.ckpt"
    resumes = last.exists()
    torch.manual_seed(0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDPOffloadStrategy(min_params=100, state_dict_type=kind, timeout=60),
        max_steps=NUM_STEPS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            KillInStep(),
            ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=2, save_top_k=0),
        ],
    )
    model = Regression()
    trainer.fit(model, ckpt_path=last if resumes else None)
    if trainer.is_global_zero:
        how = {"resumed": resumes, "step": trainer.global_step, "attempt": os.environ["TORCHELASTIC_RESTART_COUNT"]}
        torch.save({"weights": model.state_dict(), **how}, folder / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
