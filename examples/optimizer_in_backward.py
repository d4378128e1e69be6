"""Train with the optimizer in the backward. Run: python examples/optimizer_in_backward.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl

from lightning_vram import OptimizerInBackward
from lightning_vram.demos import DigitsData, DigitsResNet

trainer = pl.Trainer(
    max_epochs=2,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[OptimizerInBackward()],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(DigitsResNet(), DigitsData())
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
