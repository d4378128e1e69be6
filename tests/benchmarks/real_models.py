"""Four models that people train, on a card of 24 GB: peak memory as written, and with the plan that `AutoVRAM` makes.

    python -m tests.benchmarks.real_models [NAME ...] [-o tests/benchmarks/real_models.json]

Estimated on fake tensors for an RTX 4090: no GPU is needed. README.md shows the rows.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_vram import plan_memory
from lightning_vram.memory.units import GIB

DEVICE, BUDGET = "rtx4090", "22GiB"  # of the card's 23.5 GiB: some for fragmentation


class Trained(pl.LightningModule):
    """A network of another package, trained as its own examples do."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], optimizer: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self._loss, self._optimizer = net, loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer([weight for weight in self.parameters() if weight.requires_grad])


@dataclass(frozen=True)
class RealModel:
    """A model, one batch of it, and the arguments of its Trainer.

    Args:
        what: The row's first cell: model, data, precision, optimizer.
        make: Makes the module, on the meta device, and a batch.
        trainer: Arguments of the Trainer.
        allow: Of `AutoVRAM`.
    """

    what: str
    make: Callable[[], tuple[pl.LightningModule, Any]]
    trainer: dict[str, Any]
    allow: str = "exact"


def _adamw(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-4)


def _sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def _loss_of_tokens(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = net(**batch).loss
    return loss


def _tokens(batch_size: int, length: int) -> dict[str, Tensor]:
    tokens = torch.zeros(batch_size, length, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def llama_8b_lora() -> tuple[pl.LightningModule, Any]:
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    net = peft.get_peft_model(transformers.LlamaForCausalLM(config).to(torch.bfloat16), lora)
    return Trained(net, _loss_of_tokens, _adamw), _tokens(1, 2048)


def llama_1b() -> tuple[pl.LightningModule, Any]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Trained(transformers.LlamaForCausalLM(config), _loss_of_tokens, _adamw), _tokens(4, 2048)


def resnet_50() -> tuple[pl.LightningModule, Any]:
    import transformers

    net = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000))
    images, labels = torch.zeros(768, 3, 224, 224), torch.zeros(768, dtype=torch.int64)
    return Trained(net, _loss_of_tokens, _sgd), {"pixel_values": images, "labels": labels}


def unet_3d() -> tuple[pl.LightningModule, Any]:
    from monai.losses import DiceCELoss
    from monai.networks.nets import DynUNet

    net = DynUNet(3, 4, 3, kernel_size=[3] * 6, strides=[1, 2, 2, 2, 2, 2], upsample_kernel_size=[2] * 5)
    criterion = DiceCELoss(to_onehot_y=True, softmax=True)

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        volumes, labels = batch
        found: Tensor = criterion(net(volumes), labels)
        return found

    return Trained(net, loss, _sgd), (torch.zeros(2, 4, 224, 224, 224), torch.zeros(2, 1, 224, 224, 224))


MODELS = {
    "llama-8b-lora": RealModel(
        "Llama 3.1 8B, LoRA rank 16, batch 1 x 2048, bf16", llama_8b_lora, {"precision": "bf16-true"}, "lossless"
    ),
    "llama-1b": RealModel(
        "Llama 3.2 1B, all weights, AdamW, batch 4 x 2048, bf16-mixed",
        llama_1b,
        {"precision": "bf16-mixed"},
        "lossless",
    ),
    "resnet-50": RealModel("ResNet-50, SGD, batch 768 x 224 x 224, bf16-mixed", resnet_50, {"precision": "bf16-mixed"}),
    "unet-3d": RealModel(
        "3-D U-Net (MONAI), batch 2 x 224 x 224 x 224, bf16-mixed", unet_3d, {"precision": "bf16-mixed"}
    ),
}


def measure(name: str) -> dict[str, Any]:
    """Plan one model, and return its row.

    Returns:
        The cells of README.md; bytes as integers, ``step_time_ratio`` relative to baseline.
    """
    model = MODELS[name]
    with torch.device("meta"):
        module, shapes = model.make()
    batch = tree_map(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), shapes)
    plan = plan_memory(module, batch, device=DEVICE, budget=BUDGET, allow=model.allow, trainer=model.trainer)
    return {
        "model": model.what,
        "baseline_bytes": plan.found.plain.needed_bytes,
        "peak_bytes": plan.peak_bytes,
        "step_time_ratio": round(plan.step_time_ratio, 2),
        "results": plan.best.scheme.exactness.name.lower(),
        "features": str(plan.best.scheme),
    }


def as_row(name: str, row: dict[str, Any]) -> str:
    """Return the row of README.md."""
    baseline, peak = (f"{row[key] / GIB:.1f} GiB" for key in ("baseline_bytes", "peak_bytes"))
    allow = 'lossless (`allow="lossless"`)' if row["results"] == "lossless" else "exact"
    return f"| {row['model']} | {baseline} | {peak} | {row['step_time_ratio']:.2f} | {allow} | `{name}` |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(MODELS)}; default: all")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    rows = {}
    for name in options.names or MODELS:
        rows[name] = measure(name)
        print(as_row(name, rows[name]), rows[name]["features"], sep="\n", flush=True)
    if options.output:
        versions = {"torch": torch.__version__, "device": DEVICE, "budget": BUDGET}
        options.output.write_text(json.dumps({**versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
