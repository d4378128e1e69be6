"""What lossy compression of activations does to the gradient, and what it saves: a table of its page."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram.core.layers import select_layers
from lightning_vram.demos import ByteGPT, DigitsResNet
from lightning_vram.techniques.activation_compression.stage import CompressionStage, gradient_cosine
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row
from tests.support.networks import make_network

SETTINGS: dict[str, Any] = {}
QUICK: dict[str, Any] = {}
NUM_STEPS = 3
FORMATS = (None, "bf16", "fp8", "int8")


def _byte_gpt() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, tokens = ByteGPT(), torch.randint(256, (4, 257))
    return model, lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _digits_resnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, images, labels = DigitsResNet(), torch.randn(16, 1, 8, 8), torch.randint(10, (16,))
    return model, lambda: F.cross_entropy(model(images), labels)


def _vit() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, images = make_network("vit_small")
    labels = torch.randint(1000, (len(images),))
    return model, lambda: F.cross_entropy(model(images), labels)


MODELS = {"ByteGPT": _byte_gpt, "DigitsResNet": _digits_resnet, "ViT-S": _vit}


def measure_model(name: str, lossy: str | None) -> tuple[float, float]:
    """Kept bytes of plain, and the cosine, after three steps of AdamW with this compression."""
    torch.manual_seed(0)
    model, compute_loss = MODELS[name]()
    layers = select_layers(model).modules() if lossy is not None else None
    stage = CompressionStage(model, lossy=lossy, layers=layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        with stage:
            loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    share = stage.report.kept_bytes / stage.report.saved_bytes
    if lossy is None:
        return share, 1.0
    stage.keeps_exact = True
    with stage:
        loss = compute_loss()
    return share, gradient_cosine(stage, loss, model.parameters())


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each model and format."""
    for name in list(MODELS)[1:2] if options.is_quick else MODELS:
        for lossy in FORMATS if options.only in name else ():
            share, cosine = measure_model(name, lossy)
            variant = "ActivationCompression()" if lossy is None else f'ActivationCompression(lossy="{lossy}")'
            row = {"workload": name, "variant": variant, "by": "ours"}
            yield {**row, "kept_of_saved": share, "cosine_of_gradient": cosine}
