"""Store activations in int8 and measure the error of the gradient. Run: python examples/activation_compression.py."""

import sys

import lightning.pytorch as pl

from lightning_vram import ActivationCompression, VRAMMonitor
from lightning_vram.demos import DigitsData, DigitsResNet

compression = ActivationCompression(lossy="int8", layers="net.stages.**", gradient_cosine_every_n_batches=10)
monitor = VRAMMonitor(path=None)
trainer = pl.Trainer(
    max_steps=50,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[compression, monitor],
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(DigitsResNet(), DigitsData())
print(
    f"peak: {monitor.peaks['train'].peak_allocated_bytes} bytes; cosine of gradients: {compression.gradient_cosine:.6f}"
)
