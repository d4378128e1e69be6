"""Split a batch that does not fit inside the training step. Run: python examples/micro_batching.py."""

import sys

import lightning.pytorch as pl

from lightning_vram import ActivationCheckpointing, MicroBatching, VRAMMonitor
from lightning_vram.demos import ByteGPT, SourceText

monitor = VRAMMonitor(path=None)
splitting = MicroBatching("auto", eval="auto")  # whole, as long as there is room; MicroBatching(2): two samples
trainer = pl.Trainer(
    max_steps=50,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[splitting, ActivationCheckpointing(), monitor],
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(ByteGPT(), SourceText())
print(f"{splitting.micro_batch_size} samples at once, peak: {monitor.peaks['train'].peak_allocated_bytes} bytes")
