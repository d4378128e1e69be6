"""Recompute layers in the backward (gradient checkpointing). Run: python examples/activation_checkpointing.py."""

import sys

import lightning.pytorch as pl

from lightning_vram import ActivationCheckpointing, EmptyCache, VRAMMonitor
from lightning_vram.demos import ByteGPT, SourceText

monitor = VRAMMonitor(path=None)
trainer = pl.Trainer(
    max_steps=50,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[ActivationCheckpointing(layers="net.blocks.*"), EmptyCache(), monitor],
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(ByteGPT(), SourceText())
print(f"peak: {monitor.peaks['train'].peak_allocated_bytes} bytes")
