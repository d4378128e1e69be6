"""What is measured: models at given sizes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram.demos import ByteGPT, DigitsResNet
from tests.support.lora_nets import LoRA
from tests.support.networks import ViT, resnet50


@dataclass(frozen=True)
class Workload:
    """A model, a batch and a loss.

    Args:
        name: Text for the table.
        make_model: Builds the model on the default device.
        make_batch: Builds the batch on the default device.
        compute_loss: Of a model and a batch.
        needs_gpu: Too large for a test machine without one.
    """

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, ...]]
    compute_loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    needs_gpu: bool = False
    autocast: torch.dtype | None = None


def _gpt_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits = model(batch[0][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())


def _resnet_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_tokens(size: int, length: int) -> tuple[Tensor, ...]:
    """Random bytes [B, T + 1]."""
    return (torch.randint(256, (size, length + 1)),)


def _images(size: int, channels: int, pixels: int) -> tuple[Tensor, ...]:
    return torch.randn(size, channels, pixels, pixels), torch.randint(10, (size,))


def make_gpt(name: str, batch_size: int, *shape: int) -> Workload:
    """A ByteGPT of ``shape``: layers, width, heads, tokens."""
    return Workload(name, partial(ByteGPT, *shape), partial(make_tokens, batch_size, shape[-1]), _gpt_loss)


def _gpt(name: str, batch_size: int, *shape: int) -> Workload:
    return replace(make_gpt(name, batch_size, *shape), needs_gpu=True, autocast=torch.bfloat16)


WORKLOADS = (
    make_gpt("ByteGPT 8 x 256, T 256, B 8", 8, 8, 256, 4, 256),
    Workload(
        "DigitsResNet (2, 2) x 16, 16x16, B 32",
        partial(DigitsResNet, (2, 2), 16),
        partial(_images, 32, 1, 16),
        _resnet_loss,
    ),
    Workload(
        "DigitsResNet ResNet-50 body, 64x64, B 64",
        partial(DigitsResNet, (3, 4, 6, 3), 64, 3),
        partial(_images, 64, 3, 64),
        _resnet_loss,
        needs_gpu=True,
    ),
)


def _large_images() -> tuple[Tensor, ...]:
    images = torch.randn(256, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    return images, torch.randint(1000, (256,))


def _resnet50() -> nn.Module:
    return resnet50().to(memory_format=torch.channels_last)


_RESNET = Workload("ResNet-50, 224x224, B 256, fp32", _resnet50, _large_images, _resnet_loss, needs_gpu=True)
GPU_WORKLOADS = {
    "resnet50_bf16": replace(_RESNET, name="ResNet-50, 224x224, B 256, bf16", autocast=torch.bfloat16),
    "resnet50_fp32": _RESNET,
    "vit_b": Workload(
        "ViT-B/16, 224x224, B 128, bf16",
        partial(ViT, 768, 12, 12, 224),
        partial(_images, 128, 3, 224),
        _resnet_loss,
        needs_gpu=True,
        autocast=torch.bfloat16,
    ),
    "gpt2_small": _gpt("ByteGPT GPT-2 small, T 1024, B 16, bf16", 16, 12, 768, 12, 1024),
    "gpt2_xl": _gpt("ByteGPT GPT-2 XL, T 1024, B 8, bf16", 8, 48, 1600, 25, 1024),
    "gpt_wide": _gpt("ByteGPT 24 x 2048, T 1024, B 16, bf16", 16, 24, 2048, 16, 1024),
}
"""What a GPU is asked for, by short names."""

WORKLOADS += tuple(GPU_WORKLOADS.values())

QUICK_WORKLOADS = (
    make_gpt("ByteGPT 2 x 64, T 64, B 8", 8, 2, 64, 2, 64),
    replace(WORKLOADS[1], name="DigitsResNet (2, 2) x 16, 16x16, B 8", make_batch=partial(_images, 8, 1, 16)),
)
"""What takes a moment anywhere."""


def _lora_gpt(*shape: int) -> nn.Module:
    model = ByteGPT(*shape).requires_grad_(False)
    for block in model.net.blocks:
        block.qkv, block.mlp.expand = LoRA(block.qkv), LoRA(block.mlp.expand)
        block.attention_out, block.mlp.project = LoRA(block.attention_out), LoRA(block.mlp.project)
    return model


def _make_lora(name: str, batch_size: int, *shape: int) -> Workload:
    return replace(make_gpt(name, batch_size, *shape), make_model=partial(_lora_gpt, *shape))


FROZEN_WORKLOADS = (_make_lora("ByteGPT 4 x 512 and LoRA, T 128, B 2", 2, 4, 512, 8, 128),)
QUICK_FROZEN_WORKLOADS = (_make_lora("ByteGPT 2 x 64 and LoRA, T 64, B 8", 8, 2, 64, 2, 64),)
"""Adapters are trained, all else is frozen: for the ways of the suite ``frozen``."""
