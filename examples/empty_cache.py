"""Empty a fragmented CUDA cache around validation. Run: python examples/empty_cache.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl

from lightning_vram import EmptyCache
from lightning_vram.demos import DigitsData, DigitsResNet

trainer = pl.Trainer(
    max_epochs=2,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[EmptyCache(every_n_batches=500, min_fragmentation_bytes="512MiB")],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(DigitsResNet(), DigitsData())
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
