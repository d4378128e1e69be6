"""How well gamma's gradient survives the inversion: InPlace-ABN's formulas, ours, and a plain norm, against float64.

A float64 run of the same rounded inputs is the reference.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_vram.techniques.in_place_fusion.policy import measure_inversion_error, normalize_and_activate
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row

SETTINGS: dict[str, Any] = {"seeds": 5}
QUICK: dict[str, Any] = {"seeds": 1}

EPS = 1e-5
GAMMAS = (1.0, 0.01, 0.001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPE = (16, 32, 16, 16)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # x, gamma, beta, gradient of the output
Method = Callable[..., Tensor]  # (inputs, negative slope) -> gradient of gamma


def differentiate_plain(inputs: Inputs, slope: float) -> Tensor:
    """Batch norm and leaky ReLU of PyTorch, in the dtypes given."""
    x, gamma, beta, gradient = inputs
    gamma = gamma.clone().requires_grad_()
    output = F.leaky_relu(F.batch_norm(x, None, None, gamma, beta, training=True, eps=EPS), slope)
    return torch.autograd.grad(output, gamma, gradient)[0]


def differentiate_ours(inputs: Inputs, slope: float) -> Tensor:
    """The inversion of gamma itself."""
    x, gamma, beta, gradient = inputs
    norm = nn.BatchNorm2d(len(gamma), eps=EPS, track_running_stats=False)
    norm.weight, norm.bias = nn.Parameter(gamma), nn.Parameter(beta)
    output = normalize_and_activate(x, norm, nn.LeakyReLU(slope))
    return torch.autograd.grad(output, norm.weight, gradient)[0]


def differentiate_original(inputs: Inputs, slope: float) -> Tensor:
    """InPlace-ABN's backward: the norm runs with ``|gamma| + eps``, and that is what it divides by."""
    x, gamma, beta, gradient = inputs
    used = gamma.abs() + EPS
    output = F.leaky_relu(F.batch_norm(x, None, None, used, beta, training=True, eps=EPS), slope).to(gamma.dtype)
    is_below = output < 0
    value = torch.where(is_below, output / slope, output)
    gradient = torch.where(is_below, gradient * slope, gradient).to(gamma.dtype)
    recovered = (value - beta.view(1, -1, 1, 1)) / used.view(1, -1, 1, 1)
    return (recovered * gradient).sum((0, 2, 3)) * gamma.sign()


METHODS: dict[str, Method] = {
    "original": differentiate_original,
    "ours": differentiate_ours,
    "plain": differentiate_plain,
}
BY = {"original": "inplace_abn", "ours": "ours", "plain": "plain"}


def measure_abn_errors(slope: float = 0.01, num_seeds: int = 5) -> dict[tuple[float, torch.dtype], dict[str, float]]:
    """Measure the relative error of gamma's gradient.

    Beta is about 1. Each method is compared with a plain norm in float64; the original, which trains another model,
    with one that has its ``|gamma| + eps``.

    Returns:
        By gamma and dtype of the maps (parameters are float32): the error of each method, mean of the seeds, and the
        error of the inverse, which predicts ours.
    """
    errors: dict[tuple[float, torch.dtype], dict[str, float]] = {}
    for gamma in GAMMAS:
        for dtype in DTYPES:
            totals = dict.fromkeys((*METHODS, "predicted"), 0.0)
            for seed in range(num_seeds):
                inputs = make_inputs(gamma, dtype, seed)
                for name, method in METHODS.items():
                    x, weight, beta, gradient = (value.double() for value in inputs)
                    weight = weight + EPS if name == "original" else weight
                    exact = differentiate_plain((x, weight, beta, gradient), slope)
                    error = (method(inputs, slope).double() - exact).norm() / exact.norm()
                    totals[name] += float(error) / num_seeds
                measured = measure_inversion_error(inputs[1], inputs[2], dtype, nn.LeakyReLU(slope))
                predicted = measured.square().mean().sqrt()
                totals["predicted"] += float(predicted) / num_seeds
            errors[gamma, dtype] = totals
    return errors


def make_inputs(gamma: float, dtype: torch.dtype, seed: int) -> Inputs:
    """Noise, rounded to ``dtype``; beta is 1 with a deviation of 0.1."""
    generator = torch.Generator().manual_seed(seed)
    x, gradient = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
    beta = 1 + 0.1 * torch.randn(SHAPE[1], generator=generator)
    return x, torch.full((SHAPE[1],), gamma), beta, gradient


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each gamma, dtype and method."""
    for (gamma, dtype), errors in measure_abn_errors(num_seeds=options["seeds"]).items():
        name = f"gamma {gamma:g}, {str(dtype).removeprefix('torch.')}"
        for method, error in errors.items():
            if method != "predicted" and options.only in name:
                row = {"workload": name, "variant": method, "by": BY[method], "relative_error": error}
                yield {**row, "predicted_error": errors["predicted"]} if method == "ours" else row
