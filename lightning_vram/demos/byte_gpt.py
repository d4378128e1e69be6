"""A language model over bytes: any text is data, no tokenizer needed."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.demos.gpt import GPT

NUM_BYTES = 256


class ByteGPT(pl.LightningModule):
    """Learn to predict the next byte of a text with a GPT of any size.

    The defaults are a toy that trains on a laptop; ``ByteGPT(48, 1600, 25, 1024)`` has the body of GPT-2 XL, 1.5
    billion parameters. Logs ``train_loss`` and ``val_loss`` in nats per byte: 5.55 (ln 256) untrained, below 2.9
    after a hundred steps of eight sequences of 128 bytes with two layers. AdamW, a warm-up of 20 steps.

    Args:
        num_layers: Number of blocks.
        width: Size D of the hidden states.
        num_heads: Attention heads; must divide ``width``.
        sequence_length: Longest sequence T in bytes.
        dropout: Probability, on embeddings, attention and residual branches.
        tie_head: Whether the head uses the embedding's weight.

    Raises:
        TypeError: If a size is no ``int``.
        ValueError: If a size is below 1, ``num_heads`` does not divide ``width``, or ``dropout`` is not in [0, 1).

    Shape:
        Batch: tokens [B, T + 1] of dtype int64, 0 to 255.
    """

    def __init__(
        self,
        num_layers: int = 4,
        width: int = 128,
        num_heads: int = 4,
        sequence_length: int = 256,
        dropout: float = 0.1,
        tie_head: bool = True,  # noqa: FBT001, FBT002 - set by name in configuration files
    ) -> None:
        super().__init__()
        sizes = {
            "num_layers": num_layers,
            "width": width,
            "num_heads": num_heads,
            "sequence_length": sequence_length,
        }
        for name, value in sizes.items():
            check_positive_int(f"ByteGPT({name})", value)
        if width % num_heads:
            raise ValueError(f"ByteGPT(num_heads) must divide width={width}, got {num_heads}.")
        if not 0 <= dropout < 1:
            raise ValueError(f"ByteGPT(dropout) must be at least 0 and below 1, got {dropout}.")
        self.save_hyperparameters()
        self.net = GPT(NUM_BYTES, num_layers, width, num_heads, sequence_length, dropout)
        if tie_head:
            self.net.head.weight = self.net.embed.weight

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(tokens)
        return logits

    @override
    def training_step(self, batch: Tensor) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Tensor) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True)

    @override
    def test_step(self, batch: Tensor) -> None:
        self.log("test_loss", self._loss(batch))

    @override
    def predict_step(self, batch: Tensor) -> Tensor:
        return self.forward(batch[:, :-1]).argmax(-1)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        # The usual scaling: wider networks take smaller steps.
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.256 / self.hparams["width"], weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.05, total_iters=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}

    def _loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
