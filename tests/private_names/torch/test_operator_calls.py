"""Operators called from dispatch modes compute as they do without."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn

from lightning_vram import track_memory
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.in_place_fusion.observed_links import StorageWatch
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation


@torch.library.custom_op("lightning_vram_tests::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Autocast does not know it, and casts what it calls."""
    return (x @ y).float()


@torch.library.custom_op("lightning_vram_tests::exact_product", mutates_args=())
def exact_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Autocast casts what it is given, and is off inside."""
    return x @ y


exact_product.register_autocast("cpu", torch.float32)


class Layer(nn.Module):
    """Computes in kernels that call products, which autocast casts."""

    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(8, 8, 8, bias=False)

    def forward(self, x):
        with torch.no_grad():  # PyTorch cannot differentiate the product of a sparse float32 under autocast
            others = torch.sparse.mm(torch.eye(8).to_sparse(), x), product(x, x), exact_product(x, x)
        return torch.cat([self.bilinear(x, x), *others])


def run(*contexts, **checkpointing):
    torch.manual_seed(0)
    net = nn.Sequential(Layer())
    if checkpointing:
        apply_activation_checkpointing(net, layers="0", **checkpointing)
    x = torch.randn(8, 8, requires_grad=True)
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
    y.square().sum().backward()
    return y.detach(), x.grad, net[0].bilinear.weight.grad


def are_equal(one, other):
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "contexts",
    [
        [partial(Recomputation, min_bytes=0)],
        [StorageWatch],
        [track_memory, partial(CompressionStage, min_bytes=0), partial(Recomputation, min_bytes=0)],
    ],
)
def test_kernels_that_call_operators_run_under_the_autocast_of_their_caller(contexts):
    assert are_equal(run(*contexts), run())


@pytest.mark.parametrize("checkpointing", [{"determinism_check": "operators"}, {"save": SavePolicy("matmuls")}])
def test_so_they_do_in_layers_that_are_recomputed(checkpointing):
    assert are_equal(run(**checkpointing), run())


def test_autocast_that_is_off_stays_off():
    layer, x = Layer(), torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        expected = layer(x)
        with track_memory(), Recomputation(min_bytes=0):
            assert are_equal([layer(x)], [expected])
    assert expected.dtype is torch.float32


def test_the_fast_path_of_attention_computes_as_it_does_without():
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(x), layer.self_attn(x, x, x, need_weights=False)[0]
        with track_memory():
            assert are_equal([layer(x), layer.self_attn(x, x, x, need_weights=False)[0]], expected)
