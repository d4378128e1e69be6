"""A small training that a SLURM job runs: python training_run.py --root ... --strategy ddp|fsdp_offload.

Each rank appends a line for each start and each stop to ``events.<rank>.jsonl``; rank 0 saves the final weights.
"""

import signal

if __name__ == "__main__":  # and not where pytest looks for doctests
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram import FSDPOffloadStrategy, SlurmRequeue

BATCH_SIZE = 8


class LitNet(pl.LightningModule):
    """A block that is large enough to shard, with dropout, on data that the seed fixes."""

    def __init__(self, step_seconds: float, num_workers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 32), nn.Linear(32, 1))
        self.step_seconds, self.num_workers = step_seconds, num_workers

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.step_seconds)
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(make_data(400), BATCH_SIZE, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(make_data(64), BATCH_SIZE, num_workers=self.num_workers)


def make_data(num_samples: int) -> TensorDataset:
    inputs = torch.randn(num_samples, 16, generator=torch.Generator().manual_seed(num_samples))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


class Events(Callback):
    """Tells the test what happens when; dies where it is asked to, in the first start of a job."""

    def __init__(self, path: Path, die_at: int) -> None:
        self.path, self.die_at = path, die_at

    def write(self, **event: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event | {"time": time.time()}) + "\n")

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        environment = trainer._accelerator_connector.cluster_environment
        self.write(
            event="start",
            step=trainer.global_step,
            environment=type(environment).__name__,
            world_size=trainer.world_size,
            node_rank=trainer.node_rank,
            rank=trainer.global_rank,
            node=os.environ.get("SLURMD_NODENAME"),
            address=f"{environment.main_address}:{environment.main_port}",
            restart=os.environ.get("SLURM_RESTART_COUNT", "0"),
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.die_at and trainer.global_rank == 1:
            self.write(event="die", step=trainer.global_step)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, error: BaseException) -> None:
        self.write(event="stop", step=trainer.global_step, error=f"{type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--strategy", choices=("ddp", "fsdp_offload", "sharded"), default="ddp")
    parser.add_argument("--max_steps", type=int, default=120)
    parser.add_argument("--step_seconds", type=float, default=0.005, help="until the job is requeued; then the default")
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--save_every", type=int, default=0, help="steps between checkpoints; 0: none")
    parser.add_argument("--die_at", type=int, default=-1, help="step after which rank 1 is killed")
    parser.add_argument("--clear_up_seconds", type=float, default=0, help="what follows a fit, even one that failed")
    arguments = parser.parse_args()
    root = arguments.root
    torch.set_num_threads(1)
    pl.seed_everything(1)
    events = root / f"events.{os.environ.get('SLURM_PROCID', '0')}.jsonl"
    callbacks: list[Callback] = [Events(events, arguments.die_at), SlurmRequeue()]
    if arguments.save_every:
        saving = {"every_n_train_steps": arguments.save_every, "save_last": True, "save_top_k": 0}
        callbacks.append(ModelCheckpoint(root / "checkpoints", **saving))
    strategy: Any = "ddp"
    if arguments.strategy != "ddp":
        kind = "sharded" if arguments.strategy == "sharded" else "full"
        strategy = FSDPOffloadStrategy(min_params=100, state_dict_type=kind)
    trainer = pl.Trainer(
        accelerator="cpu",
        num_nodes=int(os.environ.get("SLURM_NNODES", "1")),
        devices=int(os.environ.get("SLURM_NTASKS_PER_NODE", "1")),
        strategy=strategy,
        max_steps=arguments.max_steps,
        callbacks=callbacks,
        default_root_dir=root,
        logger=False,
        enable_checkpointing=bool(arguments.save_every),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    step_seconds = parser.get_default("step_seconds") if requeued else arguments.step_seconds
    module = LitNet(step_seconds, arguments.num_workers)
    try:
        trainer.fit(module, ckpt_path="last" if arguments.save_every else None)
    finally:
        time.sleep(arguments.clear_up_seconds)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), root / "weights.pt")


if __name__ == "__main__":
    main()
