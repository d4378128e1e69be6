"""Train a language model without storing its full logits. Run: python examples/chunked_loss.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl

from lightning_vram import ChunkedLoss
from lightning_vram.demos import ByteGPT, SourceText

trainer = pl.Trainer(
    max_steps=20,
    limit_val_batches=1,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[ChunkedLoss()],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(ByteGPT(num_layers=2, width=32, sequence_length=64), SourceText(batch_size=4, sequence_length=64))
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
