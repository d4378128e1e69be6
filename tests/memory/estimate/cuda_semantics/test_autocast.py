"""Autocast of "cuda" on the stand-in: casts by CUDA's lists, the cache of weights, and its front door."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_vram.memory.estimate.cuda_semantics import autocast_lists
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.private_names.dispatcher import operators_cast_for

BF16, FP32 = torch.bfloat16, torch.float32
# In no list of the header: cuDNN's, which are called by name only, and one that torch 2.15 adds.
ELSEWHERE = {"_cudnn_rnn", "cudnn_convolution", "cudnn_convolution_transpose", "linalg_matrix_sqrth"}


def x_and_weight(requires_grad=True):
    x = torch.empty(8, 64, device="cuda")
    return x, nn.Parameter(torch.empty(64, 64, device="cuda"), requires_grad=requires_grad)


def num_casts(tracker):
    return sum(allocation.op == "aten._to_copy.default" for allocation in tracker.timeline.allocations)


def test_every_operator_that_cuda_casts_is_in_a_list():
    of_torch = {name for name in operators_cast_for("cuda") if name.startswith("aten::")}
    assert of_torch - set(autocast_lists()) <= {f"aten::{name}" for name in ELSEWHERE}


@pytest.mark.parametrize(
    ("name", "cast"),
    [
        ("aten::linear", "LOWER_PRECISION_FP"),
        ("aten::pow.Tensor_Scalar", "FP32"),
        ("aten::softmax.int", "FP32_SET_OPT_DTYPE"),
        ("aten::norm.Scalar", "DIFFERENT_REDISPATCH_SIGNATURE"),
        ("aten::scatter_add", "PROMOTE"),
        ("aten::binary_cross_entropy", "refused"),
    ],
)
def test_lists_are_read_from_the_header(name, cast):
    assert autocast_lists()[name] == cast


def test_a_header_that_is_not_as_it_was_is_an_error(tmp_path):
    header = tmp_path / "autocast_mode.h"
    header.write_text("#define AT_FORALL_FP32(_) _(exp)\n")
    with pytest.raises(
        RuntimeError, match=r"^the rules of autocast on CUDA cannot be read from autocast_mode.h of torch "
    ):
        autocast_lists(header)


def test_results_have_the_dtypes_of_cuda(card):
    card()
    x, weight = x_and_weight()
    with torch.autocast("cuda", torch.float16):
        y = F.linear(x, weight)
        assert y.dtype is torch.float16
        assert (y @ y.t()).dtype is torch.float16
        assert y.softmax(-1).dtype is FP32
        assert y.softmax(-1, dtype=torch.float16).dtype is torch.float16
        assert y.exp().dtype is y.sum().dtype is y.norm().dtype is FP32
        assert torch.addcmul(y, y, x).dtype is FP32
        assert torch.addcmul(y, y, y).dtype is torch.float16
        assert F.gelu(y).dtype is torch.float16
        assert F.linear(x.double(), weight.double()).dtype is torch.float64
        assert F.linear(x.cpu(), weight.cpu()).dtype is FP32


def test_a_weight_is_cast_once(card):
    card()
    x, weight = x_and_weight()
    with track_memory() as tracker, torch.autocast("cuda", BF16):
        F.linear(x, weight)
        F.linear(x, weight)
        # x twice, 2 x 1,024 bytes, of which autograd keeps none here; the weight once
        assert num_casts(tracker) == 3
        assert tracker.timeline.on("lazy:0").live_bytes == 64 * 64 * 2
    assert tracker.timeline.on("lazy:0").live_bytes == 0


@pytest.mark.parametrize("case", ["cache_enabled=False", "frozen", "view"])
def test_some_casts_are_not_cached(card, case):
    card()
    x, weight = x_and_weight(requires_grad=case != "frozen")
    if case == "view":
        weight = weight[:32]
    with track_memory() as tracker, torch.autocast("cuda", BF16, cache_enabled=case != "cache_enabled=False"):
        F.linear(x, weight)
        F.linear(x, weight)
    assert num_casts(tracker) == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_cast_as_the_forward_was(card, use_reentrant):
    card()
    x, weight = x_and_weight()
    seen = []

    def layer(x):
        seen.append((F.linear(x, weight.detach()).dtype, torch.ones(1, device="cuda").device.type))
        return F.linear(x, weight)

    with torch.autocast("cuda", BF16):
        y = checkpoint(layer, x.requires_grad_(), use_reentrant=use_reentrant)
    y.float().sum().backward()
    assert seen == [(BF16, "lazy"), (BF16, "lazy")]
