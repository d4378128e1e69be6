"""Train with parameters, gradients and optimizer state on the host. Run: python examples/fsdp_offload.py.

On several GPUs nothing changes but ``devices``; with ``torchrun`` or under SLURM neither does.
"""

import sys

import lightning.pytorch as pl

from lightning_vram import ActivationCheckpointing, FSDPOffloadStrategy, VRAMMonitor
from lightning_vram.demos import ByteGPT, SourceText

monitor = VRAMMonitor(path=None)
trainer = pl.Trainer(
    max_steps=50,
    fast_dev_run="--fast_dev_run" in sys.argv,
    devices=1,
    strategy=FSDPOffloadStrategy(offload="params", min_params=100_000),  # as the word: strategy="fsdp_offload"
    precision="bf16-mixed",
    callbacks=[ActivationCheckpointing(), monitor],
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
)
model = ByteGPT()
trainer.fit(model, SourceText())
print(f"after the fit: {type(model.net).__name__}, weights {model.dtype}, on {model.device}")
