"""Invert the activations behind batch norms: a pair saves one map instead of three.

The bits of the forward stay. The gradient uses the recovered input: a pair computes as the original modules do once
gamma is too small for that.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.hooks import is_in_backward, is_transformed
from lightning_vram.core.patching import has_own_forward
from lightning_vram.memory.device.accelerators import is_capturing
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.torch import BatchNormBase, check_dimensions, is_in_forward_ad
from lightning_vram.techniques.in_place_fusion.invertible_norm import (
    InvertibleActivation,
    Normalization,
    measure_inversion_error,
    normalize_and_activate,
)
from lightning_vram.techniques.in_place_fusion.observed_links import Link
from lightning_vram.techniques.in_place_fusion.pairs import Pair, Pairs, producing

CHECK_EVERY_N_FORWARDS = 100  # how often a pair reads gamma and beta: a GPU has to wait for that
MAX_ERROR = 4e-4
MAX_ERROR_16_BIT = 8e-3  # a fresh norm (gamma 1, beta 0) has an error of 1.6e-3 in bfloat16


def apply_inplace_abn(links: Iterable[Link]) -> Pairs:
    """Let each linked norm normalize and activate in one function that saves only its output; return the undo.

    The links must be proven, and invertible (:func:`can_invert`). A call inverts if the norm trains then. The first
    and every 100th forward that records a gradient measures the error of the inverse; a pair beyond the limit is off
    from then on. Processes that train the same weights decide alike.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Conv2d(8, 8, 3))
        >>> handle = apply_inplace_abn([Link(model[1], model[2])])
        >>> len(handle.pairs)
        1
        >>> handle.remove()
    """
    return Pairs("_invertible_norms", links, _run_norm)


def can_invert(link: Link) -> bool:
    """Whether ``link`` is a stock batch norm and a LeakyReLU or ELU with a positive slope."""
    norm, activation = link.producer, link.consumer
    if has_own_forward(norm) or has_own_forward(activation) or type(norm).forward is not BatchNormBase.forward:
        return False
    if type(activation).forward not in (nn.LeakyReLU.forward, nn.ELU.forward):
        return False
    return 0 < getattr(activation, "negative_slope", getattr(activation, "alpha", 0.0)) < float("inf")


def _normalize(pair: Pair, input: Tensor) -> Tensor | None:
    norm, activation = pair.producer, pair.consumer
    if not _is_recorded(norm, input):
        return None
    if isinstance(activation, nn.LeakyReLU):
        how = InvertibleActivation(negative_slope=activation.negative_slope)
    else:
        how = InvertibleActivation(alpha=activation.alpha)
    # In a backward a checkpoint must take the path of its forward, if that did the work of both.
    is_due = pair.num_forwards % CHECK_EVERY_N_FORWARDS == 0 and not (pair.num_forwards and is_in_backward())
    if is_due and not pair.is_off:
        pair.is_off = not is_accurate(norm, input.dtype, how)
    return None if pair.is_off else normalize_and_activate(input, norm.weight, norm.bias, _begin_forward(norm), how)


_run_norm = producing(_normalize)


def is_accurate(norm: Any, dtype: torch.dtype, activation: InvertibleActivation) -> bool:
    """Whether gamma is large enough; true without values to read, of fake tensors or in the capture of a graph."""
    parameters = [value for value in (norm.weight, norm.bias) if value is not None]
    if any(value.is_meta or isinstance(value.data, FakeTensor) or is_capturing(value.device) for value in parameters):
        return True
    limit = MAX_ERROR_16_BIT if torch.finfo(dtype).bits == 16 else MAX_ERROR
    return float(measure_inversion_error(norm.weight, norm.bias, dtype, activation).max()) <= limit


def _is_recorded(norm: Any, input: Tensor) -> bool:
    """Whether the norm trains, a gradient is recorded by autograd alone, and the norm would not refuse the input."""
    if not (norm.training and torch.is_grad_enabled()) or is_transformed() or is_in_forward_ad():
        return False
    check_dimensions(norm, input)
    is_needed = any(value is not None and value.requires_grad for value in (input, norm.weight, norm.bias))
    return is_needed and input.numel() > input.shape[1]


def _begin_forward(norm: Any) -> Normalization:
    """Count the batch, as the forward of torch.nn does."""
    momentum = norm.momentum if norm.momentum is not None else 0.0
    if not norm.track_running_stats:
        return Normalization(None, None, momentum, norm.eps)
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    return Normalization(norm.running_mean, norm.running_var, momentum, norm.eps)
