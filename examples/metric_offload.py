"""Keep what a metric collects in host memory. Run: python examples/metric_offload.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl
from torch import Tensor
from torchmetrics.classification import MulticlassAUROC

from lightning_vram import MetricOffload
from lightning_vram.demos import DigitsData, DigitsResNet


class WithAUROC(DigitsResNet):
    """The area under the curve of a whole epoch needs all its predictions at once."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = MulticlassAUROC(num_classes=10)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, digits = batch
        self.auroc.update(self(images), digits)
        self.log("auroc", self.auroc)


trainer = pl.Trainer(
    max_epochs=2,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[MetricOffload()],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(WithAUROC(), DigitsData())
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
