"""Attention by the kernel that CUDA takes: its fake kernel has the results that CUDA keeps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from lightning_vram.memory.estimate.cuda_semantics.attention.choice import Attention, choose_backend
from lightning_vram.memory.estimate.cuda_semantics.spec import CudaSpec
from lightning_vram.private_names.cuda.attention import (
    cudnn_attention,
    efficient_attention,
    flash_attention,
    math_attention,
)


def run_attention(call: Attention, spec: CudaSpec) -> Tensor:
    """Run the kernel that CUDA takes on this card."""
    return _RUN[choose_backend(call, spec)](call)


def _run_flash(call: Attention) -> Tensor:
    width = call.query.shape[-1]
    scale = call.scale if call.scale is not None else width**-0.5
    padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in (call.query, call.key, call.value)]
    result: Tensor = flash_attention(*padded, call.dropout_p, call.is_causal, scale=scale)[0]
    return result[..., :width] if width % 8 else result


def _run_efficient(call: Attention) -> Tensor:
    mask = _added_mask(call)
    if mask is not None:
        shape = (*call.query.shape[:-1], call.key.shape[-2])
        if mask.shape[-1] % 8:  # padded to where rows begin, and cut again
            mask = F.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(shape)
    rest = (mask, call.needs_gradients, call.dropout_p, call.is_causal)
    return efficient_attention(call.query, call.key, call.value, *rest, scale=call.scale)[0]  # type: ignore[no-any-return]


def _run_cudnn(call: Attention) -> Tensor:
    rest = (_added_mask(call), call.needs_gradients, call.dropout_p, call.is_causal)
    return cudnn_attention(call.query, call.key, call.value, *rest, scale=call.scale)[0]  # type: ignore[no-any-return]


def _run_math(call: Attention) -> Tensor:
    rest: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    tensors = (call.query, call.key, call.value)
    return math_attention(*tensors, _added_mask(call), call.dropout_p, call.is_causal, **rest)[0]  # type: ignore[no-any-return]


def _added_mask(call: Attention) -> Tensor | None:
    """Masks of booleans become numbers that are added."""
    mask = call.attn_mask
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=call.query.dtype, device=mask.device))


_RUN: dict[SDPBackend, Callable[[Attention], Tensor]] = {
    SDPBackend.CUDNN_ATTENTION: _run_cudnn,
    SDPBackend.FLASH_ATTENTION: _run_flash,
    SDPBackend.EFFICIENT_ATTENTION: _run_efficient,
    SDPBackend.MATH: _run_math,
}
