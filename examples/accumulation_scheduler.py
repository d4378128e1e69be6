"""Accumulate gradients: 64 samples from batches of 8. Run: python examples/accumulation_scheduler.py."""

import sys

import lightning.pytorch as pl

from lightning_vram import AccumulationScheduler
from lightning_vram.demos import ByteGPT, SourceText

is_short = "--fast_dev_run" in sys.argv
trainer = pl.Trainer(
    max_steps=8,
    fast_dev_run=is_short,
    callbacks=[AccumulationScheduler(target_batch_size=64, weight="samples")],
    limit_val_batches=4,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(ByteGPT(), SourceText(batch_size=8))
print(f"{trainer.global_step} steps of up to 64 samples")
