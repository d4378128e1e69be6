"""A script of your own under SLURM, on several nodes with DDP. Run: sbatch examples/slurm/train.sbatch."""

import signal

# Until SlurmRequeue can act on them, signals wait: the imports below take seconds.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})

import argparse
import os

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_vram import ActivationCheckpointing, SlurmRequeue
from lightning_vram.demos import ByteGPT, SourceText

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max_steps", type=int, default=1000)
parser.add_argument("--fast_dev_run", action="store_true")
arguments = parser.parse_args()
RUN_DIR = os.environ.get("RUN_DIR", "runs/" + os.environ.get("SLURM_JOB_ID", "local"))  # on a shared file system

trainer = pl.Trainer(
    num_nodes=int(os.environ.get("SLURM_NNODES", "1")),
    devices=int(os.environ.get("SLURM_NTASKS_PER_NODE", "1")),
    strategy="ddp",
    max_steps=arguments.max_steps,
    fast_dev_run=arguments.fast_dev_run,
    default_root_dir=RUN_DIR,
    callbacks=[
        ActivationCheckpointing(),
        SlurmRequeue(),
        ModelCheckpoint(f"{RUN_DIR}/checkpoints", every_n_train_steps=100, save_last=True, save_top_k=0),
    ],
    limit_val_batches=4,
    logger=False,
    enable_progress_bar=False,
)
# "last" is for a job of its own; one that SLURM has put back into the queue goes on by itself.
trainer.fit(ByteGPT(num_layers=4, width=64, sequence_length=128), SourceText(sequence_length=128), ckpt_path="last")
print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps")
