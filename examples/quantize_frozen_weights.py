"""Train adapters on a base in 4 bits. Run: python examples/quantize_frozen_weights.py [--fast_dev_run]."""

import sys

import lightning.pytorch as pl
from torch import Tensor, nn

from lightning_vram import QuantizeFrozenWeights
from lightning_vram.demos import ByteGPT, SourceText


class LoRA(nn.Module):
    """As peft has it: a frozen layer, and a product of two small ones that is trained."""

    def __init__(self, base_layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(requires_grad=False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))


class Adapted(ByteGPT):
    def __init__(self) -> None:
        super().__init__(num_layers=2, width=64, sequence_length=64)
        self.requires_grad_(requires_grad=False)
        for block in self.net.blocks:
            block.qkv, block.attention_out = LoRA(block.qkv), LoRA(block.attention_out)


trainer = pl.Trainer(
    max_steps=40,
    fast_dev_run="--fast_dev_run" in sys.argv,
    callbacks=[QuantizeFrozenWeights(bits=4, save="trainable")],
    limit_val_batches=2,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Adapted(), SourceText(batch_size=8, sequence_length=64))
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
