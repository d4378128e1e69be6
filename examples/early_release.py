"""Free gradients before each forward. Run: python examples/early_release.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl

from lightning_vram import EarlyRelease
from lightning_vram.demos import DigitsData, DigitsResNet

trainer = pl.Trainer(
    max_epochs=2,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[EarlyRelease(collect_every_n_steps=100)],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(DigitsResNet(), DigitsData())
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
