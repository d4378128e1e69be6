"""Train with 8-bit Adam. Run: python examples/low_bit_optimizer.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl

from lightning_vram import LowBitOptimizer
from lightning_vram.demos import DigitsData, DigitsResNet

trainer = pl.Trainer(
    max_epochs=2,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[LowBitOptimizer(bits=8)],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(DigitsResNet(), DigitsData())
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
