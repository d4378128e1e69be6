"""The error that stored activations make in the gradient is measured on the very graph, and changes nothing."""

import math
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.demos import ByteGPT
from lightning_vram.techniques.activation_compression.stage import CompressionStage, gradient_cosine

SIDE = 32


def byte_gpt() -> tuple[nn.Module, Callable[[], Tensor]]:
    net, tokens = ByteGPT(2, 64, 4, 64, dropout=0.1).train(), torch.randint(256, (4, 65))
    return net, lambda: F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


LEAST = {"bf16": 0.9999, "fp8": 0.998, "int8": 0.9998}


@pytest.mark.parametrize("lossy", LEAST)
def test_the_cosine_is_that_of_the_gradients_and_above_what_is_documented(lossy: str) -> None:
    torch.manual_seed(0)
    net, compute_loss = byte_gpt()
    stage = CompressionStage(net, lossy=lossy)
    state = torch.get_rng_state()
    exact = torch.autograd.grad(compute_loss(), list(net.parameters()))
    torch.set_rng_state(state)
    stage.keeps_exact = True
    with stage:
        loss = compute_loss()
    state = torch.get_rng_state()
    cosine = gradient_cosine(stage, loss, net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in net.parameters())
    loss.backward()
    one, other = (
        torch.cat([gradient.flatten().double() for gradient in gradients])
        for gradients in (exact, [parameter.grad for parameter in net.parameters()])
    )
    assert cosine == pytest.approx(float(one @ other / (one.norm() * other.norm())), abs=1e-9)
    assert LEAST[lossy] < cosine < 1.0
    assert stage.report.kept_bytes < 0.75 * stage.report.saved_bytes


def test_checkpointed_layers_draw_their_numbers_again_and_others_are_left_in_peace() -> None:
    net = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Dropout())
    stage = CompressionStage(net, lossy="bf16")
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    stage.keeps_exact = True
    with stage:
        loss = net(checkpoint(net, net(x), use_reentrant=False)).sum()
    state = torch.get_rng_state()
    assert 0.9999 < gradient_cosine(stage, loss, net.parameters()) <= 1.0
    assert torch.equal(torch.get_rng_state(), state)
    loss.backward()


def test_exact_numbers_are_kept_for_no_longer_than_asked() -> None:
    x = torch.randn(SIDE, SIDE, requires_grad=True)
    stage = CompressionStage(lossy="int8")
    stage.keeps_exact = True
    with stage:
        pass
    stage.keeps_exact = False
    with stage:
        loss = (x * 1).exp().sum()
    message = (
        "gradient_cosine(stage) has no exact gradient to compare with: set stage.keeps_exact = True before the stage "
        "is entered."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        gradient_cosine(stage, loss, [x])


def test_zero_missing_and_broken_gradients() -> None:
    x, unused = torch.randn(SIDE, SIDE, requires_grad=True), torch.ones(2, requires_grad=True)
    stage = CompressionStage(lossy="int8")
    stage.keeps_exact = True
    with stage:
        loss = (x * 1).exp().sum()
        zero = loss * 0.0
        broken = loss * torch.nan
    assert gradient_cosine(stage, loss, [x, unused, torch.ones(1)]) > 0.9
    assert math.isnan(gradient_cosine(stage, zero, [x]))
    assert gradient_cosine(stage, broken, [x]) != gradient_cosine(stage, broken, [x])
    message = "gradient_cosine(parameters) must hold one that requires a gradient, got none."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        gradient_cosine(stage, loss, [torch.ones(1)])
