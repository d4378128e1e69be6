"""The kernel that attention takes by card, dtype and shape; what each keeps, worked out by hand."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_vram.memory.estimate.cuda_kernels import Attention, choose_backend
from lightning_vram.memory.tracking.tracker import track_memory

CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
EFFICIENT, MATH = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ADA, AMPERE, HOPPER, TURING, PASCAL = (8, 9), (8, 0), (9, 0), (7, 5), (6, 1)


def make_call(dtype=BF16, width=64, heads=4, groups=None, length=128, keys=None, requires_grad=True, **rest):
    def make(heads, length, width):
        return torch.empty(2, heads, length, width, dtype=dtype, device="meta", requires_grad=requires_grad)

    keys, groups = keys or length, groups or heads
    value_width = rest.pop("value_width", width)
    return Attention(make(heads, length, width), make(groups, keys, width), make(groups, keys, value_width), **rest)


MASK = torch.empty(128, 128, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("card", "options", "backend"),
    [
        (AMPERE, {}, FLASH),
        (ADA, {"dtype": HALF}, FLASH),
        (HOPPER, {}, CUDNN),
        (HOPPER, {"attn_mask": MASK}, CUDNN),
        (HOPPER, {"dropout_p": 0.1}, FLASH),  # not a sixteenth
        (HOPPER, {"dtype": FP32}, EFFICIENT),
        ((12, 0), {}, FLASH),
        (TURING, {"dtype": HALF}, EFFICIENT),
        (TURING, {"dtype": BF16}, MATH),
        (AMPERE, {"dtype": FP32}, EFFICIENT),
        (AMPERE, {"dtype": torch.float64}, MATH),
        (AMPERE, {"dtype": FP32, "width": 66}, MATH),  # not a multiple of four
        (PASCAL, {"dtype": FP32, "width": 66}, EFFICIENT),
        (AMPERE, {"attn_mask": MASK}, EFFICIENT),
        (AMPERE, {"width": 260, "value_width": 264}, MATH),
        (AMPERE, {"width": 320}, EFFICIENT),
        (AMPERE, {"value_width": 32}, EFFICIENT),
        (AMPERE, {"keys": 64}, FLASH),
        (AMPERE, {"keys": 64, "is_causal": True}, EFFICIENT),
        (AMPERE, {"groups": 2, "enable_gqa": True}, FLASH),
        (AMPERE, {"groups": 2}, MATH),  # an error of that kernel
        (ADA, {"width": 224}, EFFICIENT),  # too wide for flash's backward there
        (ADA, {"width": 224, "requires_grad": False}, FLASH),
        (ADA, {"width": 256}, FLASH),
        (ADA, {"width": 256, "dropout_p": 0.5}, EFFICIENT),
        (AMPERE, {"width": 224}, FLASH),
    ],
)
def test_the_kernel_depends_on_the_card_and_the_call(card, options, backend):
    assert choose_backend(make_call(**options), card) == backend


@pytest.mark.parametrize(
    ("allowed", "options", "backend"),
    [
        ([MATH], {}, MATH),
        ([EFFICIENT], {}, EFFICIENT),
        ([CUDNN], {}, CUDNN),
        ([EFFICIENT, MATH], {"dtype": torch.float64}, MATH),
    ],
)
def test_kernels_can_be_ruled_out(allowed, options, backend):
    with sdpa_kernel(allowed):
        assert choose_backend(make_call(**options), ADA) == backend


def test_no_allowed_kernel_is_an_error():
    with sdpa_kernel([FLASH]), pytest.raises(RuntimeError, match=r"^No available kernel. Aborting execution.$"):
        choose_backend(make_call(dtype=FP32), ADA)


# [2, 4, 100, 64] of queries, keys and values: 51,200 numbers each; 800 rows of scores. Seed and offset of the random
# numbers are 24 bytes for flash, 16 for the others.
@pytest.mark.parametrize(
    ("capability", "dtype", "allowed", "saved_bytes"),
    [
        ((8, 0), BF16, None, 51_200 * 2 + 800 * 4 + 24),  # flash: the result, a sum in float32 for each row
        ((9, 0), BF16, None, 51_200 * 2 + 800 * 4 + 16),  # cuDNN: the same
        ((8, 0), FP32, None, 51_200 * 4 + 8 * 128 * 4 + 16),  # efficient: rows are padded to a multiple of 32
        # math: the scaled queries and keys, the scores after the softmax, the result of the last product
        ((8, 0), FP32, MATH, 2 * 51_200 * 4 + 80_000 * 4 + 51_200 * 4),
    ],
)
def test_what_is_kept_is_what_the_kernel_keeps(card, capability, dtype, allowed, saved_bytes):
    card(*capability)
    tensors = [torch.empty(2, 4, 100, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3)]
    with sdpa_kernel(allowed) if allowed else nullcontext(), track_memory() as tracker:
        result = F.scaled_dot_product_attention(*tensors)
    assert result.requires_grad
    assert tracker.timeline.on("lazy:0").saved_for_backward_bytes == saved_bytes


def test_a_width_that_flash_cannot_take_is_padded(card):
    card(8, 0)
    tensors = [torch.empty(2, 4, 100, 60, dtype=BF16, device="cuda", requires_grad=True) for _ in range(3)]
    with track_memory() as tracker:
        result = F.scaled_dot_product_attention(*tensors)
    assert result.shape[-1] == 60
    padded = 4 * 51_200 * 2 + 800 * 4 + 24  # queries, keys and values with 64 columns, and the result
    assert tracker.timeline.on("lazy:0").saved_for_backward_bytes == padded
    result.sum().backward()
    assert tensors[0].grad.shape == tensors[0].shape
