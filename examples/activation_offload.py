"""Move saved activations to host memory until the backward. Run: python examples/activation_offload.py."""

import sys
import warnings

import lightning.pytorch as pl

from lightning_vram import ActivationCheckpointing, ActivationOffload, VRAMMonitor
from lightning_vram.demos import ByteGPT, SourceText

warnings.filterwarnings("ignore", "ActivationOffload offloads", UserWarning)  # without a GPU
monitor = VRAMMonitor(path=None)
trainer = pl.Trainer(
    max_steps=50,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[ActivationCheckpointing(), ActivationOffload(min_offload_bytes="64KiB"), monitor],
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(ByteGPT(), SourceText())
print(f"peak: {monitor.peaks['train'].peak_allocated_bytes} bytes")
