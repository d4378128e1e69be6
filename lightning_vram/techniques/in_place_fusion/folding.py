"""Fold batch norms with frozen statistics into the convolutions before them, on the fly and from the live parameters.

The convolution's own output, which the norm would save for backward, never exists. Autograd differentiates through the
folding, so both modules train on ("Tune mode", https://arxiv.org/abs/2305.11624). Equal up to rounding. Autograd saves
the folded weights unless they are recomputed: without recomputation, small batches use more memory, not less.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.hooks import is_transformed
from lightning_vram.core.patching import has_own_forward, plain_class_forward
from lightning_vram.core.tensors.properties import PLAIN_TYPES
from lightning_vram.private_names.torch import class_conv_forward, convolve_with
from lightning_vram.techniques.in_place_fusion.observed_links import Link
from lightning_vram.techniques.in_place_fusion.pairs import Pair, Pairs, producing

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_CONV_METHODS = {(kind.forward, class_conv_forward(kind)) for kind in CONVOLUTIONS}
_NORM_FORWARDS = {kind.forward for kind in BATCH_NORMS}


def fold_frozen_batch_norm(links: Iterable[Link]) -> Pairs:
    """Let convolutions do the work of the frozen batch norms that follow them; return the undo.

    A call folds if the norm is in evaluation mode then. The links must be proven, and foldable (:func:`can_fold`).
    """
    return Pairs("_frozen_batch_norm_folding", links, _run_convolution)


def can_fold(link: Link) -> bool:
    """Whether ``link`` is a stock convolution and a stock batch norm with running statistics."""
    convolution, norm = link.producer, link.consumer
    methods = plain_class_forward(convolution), class_conv_forward(type(convolution))
    if has_own_forward(convolution) or has_own_forward(norm) or methods not in _CONV_METHODS:
        return False
    if plain_class_forward(norm) not in _NORM_FORWARDS or not isinstance(norm, BATCH_NORMS):
        return False
    return norm.running_mean is not None and norm.num_features == convolution.out_channels


@producing
def _run_convolution(pair: Pair, input: Tensor) -> Tensor | None:
    convolution, norm = pair.producer, pair.consumer
    if norm.training or norm.running_mean is None or norm.running_var is None or is_transformed():
        return None
    tensors = (convolution.weight, convolution.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    if not all(tensor is None or type(tensor) in PLAIN_TYPES for tensor in tensors):
        return None  # FSDP2 has sharded the norm, which is in another group
    return convolve_with(convolution, input, *_fold(convolution, norm))


def _fold(convolution: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias that do what both modules do. Computed in float32 at least."""
    weight, bias = convolution.weight, convolution.bias
    dtype = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(norm.running_var.to(dtype) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.to(dtype)
    mean = norm.running_mean.to(dtype)
    shift = (bias.to(dtype) - mean if bias is not None else -mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(dtype)
    folded = weight.to(dtype) * scale.view(-1, *[1] * (weight.dim() - 1))
    return folded.to(weight.dtype), shift.to(weight.dtype)
