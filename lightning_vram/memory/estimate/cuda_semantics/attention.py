"""Attention as CUDA runs it: the first kernel that can, by the rules of ``sdp_utils.cpp`` without nested tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from lightning_vram.private_names.cuda.attention import (
    cudnn_attention,
    efficient_attention,
    flash_attention,
    math_attention,
    preferred_backends,
)

Capability = tuple[int, int]
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
# torch 2.14 taught the efficient kernel grouped queries, and fused kernels to broadcast one head of keys.
_GROUPS_IN_ALL = _TORCH >= (2, 14)
_HALVES = (torch.float16, torch.bfloat16)
_WITH_BFLOAT16 = (8, 0)  # older cards convert


@dataclass(frozen=True)
class Attention:
    """One call of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward may come."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def run_attention(call: Attention, capability: Capability) -> Tensor:
    """Run the kernel that CUDA takes on a card of this compute capability."""
    return _RUN[choose_backend(call, capability)](call)


def choose_backend(call: Attention, capability: Capability) -> SDPBackend:
    """Return the kernel that CUDA chooses."""
    order = preferred_backends()
    is_default = order[:2] == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if is_default and capability[0] in (9, 10):
        order = [SDPBackend.CUDNN_ATTENTION, *order]
    for backend in order:
        if _can(backend, call, capability):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _can(backend: SDPBackend, call: Attention, capability: Capability) -> bool:
    if backend == SDPBackend.MATH:  # not all members of this enumeration are the same object
        return bool(torch.backends.cuda.math_sdp_enabled())  # type: ignore[no-untyped-call]
    if backend not in _CAN:
        return False
    is_enabled, can = _CAN[backend]
    return is_enabled() and _is_fusable(call) and can(call, capability)


def _is_fusable(call: Attention) -> bool:
    tensors = (call.query, call.key, call.value)
    return (
        all(t.dim() == 4 and t.shape[0] == call.query.shape[0] and t.dtype is call.query.dtype for t in tensors)
        and all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)
        and call.query.shape[-2] > 0
        and call.key.shape[-2] > 0
    )


def _can_cudnn(call: Attention, capability: Capability) -> bool:
    q, k, v = call.query, call.key, call.value
    widest = 256 if _TORCH >= (2, 15) and capability[0] in (9, 10) else 128
    is_wide = q.shape[-1] > 128 or v.shape[-1] > 128
    return (
        _takes_halves(call, capability)
        and _has_groups(call, is_grouping=True)
        and max(q.shape[-1], v.shape[-1]) <= widest
        and not (is_wide and call.needs_gradients and (q.shape[-1], v.shape[-1]) not in ((192, 128), (256, 256)))
        and q.shape[-1] % 8 == v.shape[-1] % 8 == 0
        and k.shape[-2] != 1
        and (call.dropout_p * 16).is_integer()
        and not (call.dropout_p and q.shape[-2] == 1)
        and not (call.attn_mask is not None and call.attn_mask.requires_grad)
        and not (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
    )


def _can_flash(call: Attention, capability: Capability) -> bool:
    q, k, v = call.query, call.key, call.value
    is_small_card = capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
    is_wide = 192 < q.shape[-1] <= 224 or (q.shape[-1] > 224 and call.dropout_p > 0)
    return (
        _takes_halves(call, capability)
        and _has_groups(call, is_grouping=True)
        and capability >= (8, 0)
        and call.attn_mask is None
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and not (is_small_card and is_wide and call.needs_gradients)
        and not (call.is_causal and q.shape[-2] != k.shape[-2])
    )


def _can_efficient(call: Attention, capability: Capability) -> bool:
    q, k, v = call.query, call.key, call.value
    is_native = q.dtype is not torch.bfloat16 or capability >= _WITH_BFLOAT16
    aligned = _alignment(q.dtype, capability)
    return (
        q.dtype in (*_HALVES, torch.float32)
        and is_native
        and _has_groups(call, is_grouping=_GROUPS_IN_ALL)
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] % aligned == v.shape[-1] % aligned == 0
    )


def _takes_halves(call: Attention, capability: Capability) -> bool:
    return call.query.dtype in (_HALVES if capability >= _WITH_BFLOAT16 else (torch.float16,))


def _has_groups(call: Attention, *, is_grouping: bool) -> bool:
    """Whether the numbers of heads go together."""
    q, k, v = (t.shape[-3] for t in (call.query, call.key, call.value))
    if q == k == v:
        return True
    is_broadcast = _GROUPS_IN_ALL and k == v == 1
    return is_broadcast or (is_grouping and call.enable_gqa and k == v and q % k == 0)


def _alignment(dtype: torch.dtype, capability: Capability) -> int:
    is_half = dtype in _HALVES
    if capability >= (8, 0):
        return 8 if is_half else 4
    return 8 if is_half and capability >= (7, 0) else 1


_CAN: dict[SDPBackend, tuple[Callable[[], bool], Callable[[Attention, Capability], bool]]] = {
    SDPBackend.CUDNN_ATTENTION: (torch.backends.cuda.cudnn_sdp_enabled, _can_cudnn),
    SDPBackend.FLASH_ATTENTION: (torch.backends.cuda.flash_sdp_enabled, _can_flash),
    SDPBackend.EFFICIENT_ATTENTION: (torch.backends.cuda.mem_efficient_sdp_enabled, _can_efficient),
}


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
