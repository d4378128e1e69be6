"""Recompute cheap activations in the backward, for any LightningModule. Run: python examples/in_place_fusion.py."""

import sys

import lightning.pytorch as pl

from lightning_vram import InPlaceFusion, VRAMMonitor
from lightning_vram.demos import DigitsData, DigitsResNet

monitor = VRAMMonitor(path=None)
trainer = pl.Trainer(
    max_steps=50,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[InPlaceFusion(), monitor],
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(DigitsResNet(), DigitsData())
print(f"peak: {monitor.peaks['train'].peak_allocated_bytes} bytes")
