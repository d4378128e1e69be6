"""Check whether a run fits before it starts. Run: python examples/memory_budget.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl

from lightning_vram import MemoryBudget
from lightning_vram.demos import DigitsData, DigitsResNet

trainer = pl.Trainer(
    max_epochs=2,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[MemoryBudget("auto", on_excess="error")],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(DigitsResNet(), DigitsData())
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
