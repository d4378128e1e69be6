"""Kernels of attention as operators, and the order in which they are tried.

* ``torch.ops.aten._scaled_dot_product_flash_attention``: flash attention | 2.11 - | attention cannot be estimated
* ``torch.ops.aten._scaled_dot_product_efficient_attention``: the one of xformers | 2.11 - | as without flash's
* ``torch.ops.aten._scaled_dot_product_cudnn_attention``: cuDNN's | 2.11 - | as without flash's
* ``torch.ops.aten._scaled_dot_product_attention_math``: plain products | 2.11 - | as without flash's
* ``torch.ops.aten._scaled_dot_product_flash_attention_backward``: its backward | 2.11 - | no scratch
* ``torch.ops.aten._scaled_dot_product_efficient_attention_backward``: its backward | 2.11 - | no scratch
* ``torch._C._get_sdp_priority_order``: which is tried first | 2.11 - | attention cannot be estimated
"""

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
