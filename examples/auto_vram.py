"""Make a run fit half of the memory it needs, automatically. Run: python examples/auto_vram.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl

from lightning_vram import AutoVRAM
from lightning_vram.demos import DigitsData, DigitsResNet

trainer = pl.Trainer(
    max_epochs=2,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[AutoVRAM(0.9, allow="lossless")],  # or bytes: AutoVRAM("20GiB")
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(DigitsResNet(), DigitsData())
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
