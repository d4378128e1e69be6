"""Which pairs of batch norm and activation cannot be inverted, or not well enough."""

from collections.abc import Container
from typing import Any, Protocol

import torch
from torch import nn

from lightning_vram.memory.device.accelerators import is_capturing
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.modules import BatchNormBase
from lightning_vram.techniques.in_place_fusion.inplace_abn.inversion import (
    InvertibleActivation,
    predict_inversion_error,
)

MAX_ERROR = 1e-3
MAX_ERROR_16_BIT = 2e-2
"""In 16 bits a fresh norm (gamma 1, beta 0) has a predicted error of 3.9e-3 (bfloat16) or 4.9e-4 (float16)."""

STATE = "_invertible_norms"
"""Where a module that was changed keeps what its pair shares."""


class Link(Protocol):
    """A norm whose output goes to one activation, unchanged, and nowhere else."""

    @property
    def producer(self) -> nn.Module:
        """BatchNorm1d, 2d, 3d or SyncBatchNorm."""

    @property
    def consumer(self) -> nn.Module:
        """LeakyReLU, ELU or Identity; several norms may share it, and it may be called on other tensors."""


def check_pair(
    index: int, link: Link, changed: Container[nn.Module], dtype: torch.dtype | None, max_error: float | None
) -> None:
    """Raise ``ValueError`` if a pair cannot be inverted; an activation among ``changed`` may serve another norm."""
    name = f"link {index}, {_describe(link.producer)} followed by {link.consumer}"
    _check_link(name, link, changed)
    _check_error(name, link, dtype, max_error)


def _check_link(name: str, link: Link, changed: Container[nn.Module]) -> None:
    is_shared = link.consumer in changed
    for module in (link.producer, link.consumer):
        if STATE in vars(module) and not (is_shared and module is link.consumer):
            raise ValueError(f"{name}: {_describe(module)} is linked already. Link each norm once, to one activation.")
        if "forward" in vars(module):
            raise ValueError(
                f"{name}: forward was replaced on the instance of {_describe(module)}. Leave the pair out."
            )
    if type(link.producer).forward not in (BatchNormBase.forward, nn.SyncBatchNorm.forward):
        raise ValueError(
            f"{name}: {_describe(link.producer)} does not run as a batch norm of torch.nn. "
            "Link BatchNorm1d, BatchNorm2d, BatchNorm3d or SyncBatchNorm."
        )
    if not is_shared:
        _check_activation(name, link.consumer)


def _check_activation(name: str, consumer: nn.Module) -> None:
    way_out = "Use LeakyReLU, or leave the pair to the recomputation of InPlaceFusion, which needs no inverse."
    forward = type(consumer).forward
    if forward not in (nn.LeakyReLU.forward, nn.ELU.forward, nn.Identity.forward):
        is_cut = isinstance(consumer, (nn.ReLU, nn.ReLU6))
        reason = "it drops negative values" if is_cut else "its output does not determine its input"
        raise ValueError(f"{name}: {type(consumer).__name__} cannot be inverted: {reason}. {way_out}")
    for argument in ("negative_slope", "alpha"):
        value = getattr(consumer, argument, 1.0) if forward is not nn.Identity.forward else 1.0
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}: with {argument}={value} it cannot be inverted; it must be above 0. {way_out}")


def _check_error(name: str, link: Link, dtype: torch.dtype | None, max_error: float | None) -> None:
    norm: Any = link.producer
    parameter = next((value for value in (norm.weight, norm.bias, norm.running_mean) if value is not None), None)
    dtype = dtype or (parameter.dtype if parameter is not None else torch.get_default_dtype())
    limit = limit_error(max_error, dtype)
    error = read_error(norm, dtype, read_activation(link.consumer))
    if not error <= limit:
        gamma = float(norm.weight.detach().abs().min()) if norm.weight is not None else 1.0
        raise ValueError(
            f"{name}: with gamma down to {gamma:.3g} in {str(dtype).removeprefix('torch.')}, its input is recovered "
            f"with a predicted relative error of {error:.2g}, above {limit:.2g}. Train in float32, raise max_error, or "
            "leave the pair to the recomputation of InPlaceFusion, which is exact."
        )


def limit_error(max_error: float | None, dtype: torch.dtype) -> float:
    """Return the largest predicted error that is allowed."""
    if max_error is not None:
        return max_error
    return MAX_ERROR_16_BIT if torch.finfo(dtype).bits == 16 else MAX_ERROR


def read_error(norm: Any, dtype: torch.dtype, activation: InvertibleActivation) -> float:
    """The worst channel's predicted error; zero where there are no values to read: fake tensors, graph capture."""
    parameters = [value for value in (norm.weight, norm.bias) if value is not None]
    is_abstract = any(value.is_meta or isinstance(value.data, FakeTensor) for value in parameters)
    if is_abstract or any(is_capturing(value.device) for value in parameters):
        return 0.0
    return float(predict_inversion_error(norm.weight, norm.bias, dtype, activation).max())


def read_activation(consumer: nn.Module) -> InvertibleActivation:
    """Return what a module does to the norm's result."""
    if isinstance(consumer, nn.LeakyReLU):
        return InvertibleActivation(negative_slope=consumer.negative_slope)
    return InvertibleActivation(alpha=consumer.alpha if isinstance(consumer, nn.ELU) else None)


def _describe(module: nn.Module) -> str:
    return f"{type(module).__name__}({getattr(module, 'num_features', '')})"
