"""Train with 14 instead of 16 bytes per parameter, exact. Run: python examples/lean_mixed_precision.py."""

import sys

import lightning.pytorch as pl

from lightning_vram import LeanMixedPrecision, VRAMMonitor
from lightning_vram.demos import ByteGPT, SourceText

monitor = VRAMMonitor(path=None)
precision = LeanMixedPrecision(
    "bf16",
    parameters="bf16+split",  # bf16 weights plus the 16-bit remainder of fp32
    low_precision_norms=True,
    fp32_modules=["net.head"],  # the logits
)
trainer = pl.Trainer(
    max_steps=50,
    fast_dev_run="--fast_dev_run" in sys.argv,
    plugins=[precision],
    callbacks=[monitor],
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
)
model = ByteGPT()
trainer.fit(model, SourceText())
print(f"weights after the fit: {model.dtype}; peak: {monitor.peaks['train'].peak_allocated_bytes} bytes")
