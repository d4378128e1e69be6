"""Kernels of attention as operators, and the order in which they are tried."""

from typing import Any

import torch
from torch.nn.attention import SDPBackend

flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
cudnn_attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
efficient_backward: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
math_attention: Any = torch.ops.aten._scaled_dot_product_attention_math.default


def preferred_backends() -> list[SDPBackend]:
    """Return the kernels in the order in which they are tried."""
    return [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
