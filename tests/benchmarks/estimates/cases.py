"""What is trained and estimated: models of usual kinds, each with usual ways to train it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram import (
    ActivationCheckpointing,
    ActivationOffload,
    FSDPOffloadStrategy,
    InPlaceFusion,
    LeanMixedPrecision,
    MicroBatching,
)
from lightning_vram.demos import ByteGPT, DigitsResNet
from lightning_vram.memory.estimate.fake_device import UntouchedWeights
from tests.support.cuda_parity_models import Llama
from tests.support.networks import ViT

Batch = tuple[Tensor, ...]
Options = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A network, a batch and a loss.

    Args:
        make: Builds the network.
        make_batch: Builds the batch.
        compute_loss: Of a network and a batch.
    """

    make: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    compute_loss: Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """A model and a way to train it.

    Args:
        model: Which.
        make_options: Makes arguments of a Trainer.
        is_fused: Whether AdamW is the fused one; otherwise it is the one for many tensors at once.
    """

    model: Model
    make_options: Callable[[], Options]
    is_fused: bool = False

    def make_module(self) -> pl.LightningModule:
        """Build the module, whose large weights have no values: kernels take the same memory for any."""
        with UntouchedWeights():
            return _Lit(self.model, is_fused=self.is_fused)


class _Lit(pl.LightningModule):
    def __init__(self, model: Model, *, is_fused: bool) -> None:
        super().__init__()
        self.net = model.make()
        self.compute_loss = model.compute_loss
        self.is_fused = is_fused

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.compute_loss(self.net, batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.is_fused or None)


def _bytes_loss(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())


def _class_loss(net: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def _own_loss(net: nn.Module, batch: Batch) -> Tensor:
    return net(*batch)


def _tokens(size: int, length: int) -> Batch:
    return (torch.zeros(size, length + 1, dtype=torch.int64),)


def _pairs(size: int, length: int) -> Batch:
    return torch.zeros(size, length, dtype=torch.int64), torch.zeros(size, length, dtype=torch.int64)


def _images(size: int, pixels: int) -> Batch:
    return torch.zeros(size, 3, pixels, pixels), torch.zeros(size, dtype=torch.int64)


def _gpt(num_layers: int, width: int, num_heads: int, length: int, batch_size: int) -> Model:
    make = partial(_net_of, ByteGPT, num_layers, width, num_heads, length)
    return Model(make, partial(_tokens, batch_size, length), _bytes_loss)


def _net_of(kind: type[pl.LightningModule], *arguments: Any) -> nn.Module:
    return kind(*arguments).net


MODELS = {
    "small gpt": _gpt(1, 256, 4, 256, 16),
    "gpt": _gpt(4, 256, 4, 256, 16),
    "wide gpt": _gpt(6, 768, 12, 512, 4),
    "long gpt": _gpt(2, 512, 8, 2048, 2),
    "resnet": Model(partial(_net_of, DigitsResNet, (3, 4, 6, 3), 64, 3), partial(_images, 32, 64), _class_loss),
    "vit": Model(partial(ViT, 384, 6, 6, 128), partial(_images, 64, 128), _class_loss),
    "llama": Model(Llama, partial(_pairs, 64, 256), _own_loss),
}


def _callbacks(*makes: Callable[[], Any], **options: Any) -> Callable[[], Options]:
    return lambda: {"callbacks": [make() for make in makes], **options}


def _plugins(**arguments: Any) -> Callable[[], Options]:
    return lambda: {"plugins": [LeanMixedPrecision(**arguments)]}


def _sharded(offload: str, **options: Any) -> Callable[[], Options]:
    return lambda: {"strategy": FSDPOffloadStrategy(offload=offload, min_params=100, cpu_threads=1), **options}


_OFFLOAD = partial(ActivationOffload, "64KiB")
WAYS: dict[str, Callable[[], Options]] = {
    "fp32": dict,
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {"precision": "16-mixed"},
    "clipped": lambda: {"gradient_clip_val": 1.0},
    "accumulated": lambda: {"accumulate_grad_batches": 2},
    "checkpointed": _callbacks(ActivationCheckpointing),
    "checkpointed, bf16-mixed": _callbacks(ActivationCheckpointing, precision="bf16-mixed"),
    "matmuls kept": _callbacks(partial(ActivationCheckpointing, save="matmuls")),
    "offloaded": _callbacks(_OFFLOAD),
    "offloaded, bf16-mixed": _callbacks(_OFFLOAD, precision="bf16-mixed"),
    "checkpointed, offloaded": _callbacks(ActivationCheckpointing, _OFFLOAD),
    "in parts": _callbacks(partial(MicroBatching, 4)),
    "lean bf16": _plugins(precision="bf16"),
    "lean bf16, recast": _plugins(precision="bf16", recast_in_backward=True),
    "lean fp16": _plugins(precision="fp16"),
    "fused": _callbacks(InPlaceFusion),
    "sharded": _sharded("none"),
    "fsdp_offload": _sharded("params"),
    "fsdp_offload_optimizer": _sharded("optimizer"),
    "fsdp_offload_optimizer, bf16-mixed": _sharded("optimizer", precision="bf16-mixed"),
}
FUSED_ADAMW = "fused AdamW"
_CHOSEN = {
    "small gpt": ("fp32", "bf16-mixed", "clipped", "in parts"),
    "gpt": (*WAYS, FUSED_ADAMW),
    "wide gpt": (
        *("fp32", "bf16-mixed", "clipped", FUSED_ADAMW, "checkpointed", "matmuls kept", "offloaded", "lean bf16"),
        *("fsdp_offload", "fsdp_offload_optimizer", "fsdp_offload_optimizer, bf16-mixed"),
    ),
    "long gpt": ("fp32", "bf16-mixed", "checkpointed", "offloaded", "in parts", "fused"),
    "resnet": ("fp32", "bf16-mixed", "fused", "checkpointed", "offloaded", "fsdp_offload"),
    "vit": ("fp32", "bf16-mixed", "16-mixed", "fused", "offloaded", "in parts", "fsdp_offload_optimizer"),
    "llama": ("fp32", "bf16-mixed", "checkpointed", "matmuls kept", "accumulated", "lean bf16, recast"),
}
CASES = {
    f"{model}, {way}": Case(MODELS[model], WAYS.get(way, dict), way == FUSED_ADAMW)
    for model, ways in _CHOSEN.items()
    for way in ways
}
"""By name."""
