"""A ResNet that reads handwritten digits."""

from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.demos.resnet import ResNet

NUM_DIGITS = 10


class DigitsResNet(pl.LightningModule):
    """Classify images of digits with a bottleneck ResNet of any size.

    The defaults are a toy that trains on a laptop: above 93 % validation accuracy after five epochs of
    :class:`DigitsData`. ``DigitsResNet((3, 4, 6, 3), 64)`` has the body of ResNet-50. Logs ``train_loss``,
    ``val_loss`` and ``val_accuracy``.

    Args:
        blocks_per_stage: Number of bottlenecks per stage; each stage after the first halves the image.
        width: Channels inside the bottlenecks of the first stage; doubles with each stage.
        in_channels: Channels of the images.

    Raises:
        TypeError: If a size is no ``int``.
        ValueError: If a size is below 1 or there is no stage.

    Shape:
        Batch: images [B, in_channels, H, W] of dtype float32, labels [B] of dtype int64.
    """

    def __init__(self, blocks_per_stage: Sequence[int] = (2, 2), width: int = 16, in_channels: int = 1) -> None:
        super().__init__()
        if not blocks_per_stage:
            raise ValueError("DigitsResNet(blocks_per_stage) must name at least one stage, got none.")
        for num_blocks in blocks_per_stage:
            check_positive_int("DigitsResNet(blocks_per_stage)", num_blocks)
        check_positive_int("DigitsResNet(width)", width)
        check_positive_int("DigitsResNet(in_channels)", in_channels)
        self.save_hyperparameters()
        self.net = ResNet(blocks_per_stage, width, in_channels, NUM_DIGITS)
        self.val_accuracy = MulticlassAccuracy(NUM_DIGITS, average="micro")

    @override
    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.forward(batch[0]).argmax(-1)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
