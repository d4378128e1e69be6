"""Which kernel ``scaled_dot_product_attention`` takes on CUDA: the first in the order of priority that can.

The rules are those of ``sdp_utils.cpp``, without nested tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lightning_vram.memory.estimate.cuda_semantics.spec import CudaSpec
from lightning_vram.private_names.cuda.attention import preferred_backends

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
# torch 2.14 taught the efficient kernel grouped queries, and fused kernels to broadcast one head of keys.
_GROUPS_IN_ALL = _TORCH >= (2, 14)
_HALVES = (torch.float16, torch.bfloat16)


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


def choose_backend(call: Attention, spec: CudaSpec) -> SDPBackend:
    """Return the kernel that CUDA takes on this card.

    Raises:
        RuntimeError: If none of those that are allowed can.
    """
    for backend in _order(spec):
        if _can(backend, call, spec):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(spec: CudaSpec) -> Iterable[SDPBackend]:
    order = preferred_backends()
    is_default = order[:2] == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if is_default and spec.compute_capability[0] in (9, 10):
        return [SDPBackend.CUDNN_ATTENTION, *order]
    return order


def _can(backend: SDPBackend, call: Attention, spec: CudaSpec) -> bool:
    if backend == SDPBackend.MATH:  # not all members of this enumeration are the same object
        return bool(torch.backends.cuda.math_sdp_enabled())  # type: ignore[no-untyped-call]
    if backend not in _CAN:
        return False
    is_enabled, can = _CAN[backend]
    return is_enabled() and _is_fusable(call) and can(call, spec)


def _is_fusable(call: Attention) -> bool:
    tensors = (call.query, call.key, call.value)
    return (
        all(t.dim() == 4 and t.shape[0] == call.query.shape[0] and t.dtype is call.query.dtype for t in tensors)
        and all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)
        and call.query.shape[-2] > 0
        and call.key.shape[-2] > 0
    )


def _can_cudnn(call: Attention, spec: CudaSpec) -> bool:
    q, k, v = call.query, call.key, call.value
    widest = 256 if _TORCH >= (2, 15) and spec.compute_capability[0] in (9, 10) else 128
    is_wide = q.shape[-1] > 128 or v.shape[-1] > 128
    return (
        _takes_halves(call, spec)
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


def _can_flash(call: Attention, spec: CudaSpec) -> bool:
    q, k, v = call.query, call.key, call.value
    is_small_card = spec.compute_capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
    is_wide = 192 < q.shape[-1] <= 224 or (q.shape[-1] > 224 and call.dropout_p > 0)
    return (
        _takes_halves(call, spec)
        and _has_groups(call, is_grouping=True)
        and spec.compute_capability >= (8, 0)
        and call.attn_mask is None
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and not (is_small_card and is_wide and call.needs_gradients)
        and not (call.is_causal and q.shape[-2] != k.shape[-2])
    )


def _can_efficient(call: Attention, spec: CudaSpec) -> bool:
    q, k, v = call.query, call.key, call.value
    is_native = q.dtype is not torch.bfloat16 or spec.has_bfloat16
    aligned = _alignment(q.dtype, spec)
    return (
        q.dtype in (*_HALVES, torch.float32)
        and is_native
        and _has_groups(call, is_grouping=_GROUPS_IN_ALL)
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] % aligned == v.shape[-1] % aligned == 0
    )


def _takes_halves(call: Attention, spec: CudaSpec) -> bool:
    return call.query.dtype in (_HALVES if spec.has_bfloat16 else (torch.float16,))


def _has_groups(call: Attention, *, is_grouping: bool) -> bool:
    """Whether the numbers of heads go together."""
    q, k, v = (t.shape[-3] for t in (call.query, call.key, call.value))
    if q == k == v:
        return True
    is_broadcast = _GROUPS_IN_ALL and k == v == 1
    return is_broadcast or (is_grouping and call.enable_gqa and k == v and q % k == 0)


def _alignment(dtype: torch.dtype, spec: CudaSpec) -> int:
    """Elements that a row must have a multiple of."""
    is_half = dtype in _HALVES
    if spec.compute_capability >= (8, 0):
        return 8 if is_half else 4
    return 8 if is_half and spec.compute_capability >= (7, 0) else 1


_CAN: dict[SDPBackend, tuple[Callable[[], bool], Callable[[Attention, CudaSpec], bool]]] = {
    SDPBackend.CUDNN_ATTENTION: (torch.backends.cuda.cudnn_sdp_enabled, _can_cudnn),
    SDPBackend.FLASH_ATTENTION: (torch.backends.cuda.flash_sdp_enabled, _can_flash),
    SDPBackend.EFFICIENT_ATTENTION: (torch.backends.cuda.mem_efficient_sdp_enabled, _can_efficient),
}
