"""Copies on a side stream: the bits of a plain run, the promised memory, host memory that does not grow."""

import copy
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.devices import DEVICE, at_size, device_module, requested_bytes
from torch import Tensor, nn

from lightning_vram.demos import ByteGPT
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("deterministic_kernels")]


def step(network: nn.Module, x: Tensor, context: Any, dtype: torch.dtype | None = None) -> int:
    """Take a step of gradients; return the bytes that were requested for the backward."""
    network.zero_grad()
    device_module().synchronize()
    before = requested_bytes()
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None), context:
        loss = network(x).float().square().mean()
    device_module().synchronize()
    if isinstance(context, ActivationOffloading):
        context.settle()
    kept = requested_bytes() - before
    loss.backward()
    return kept


def assert_equal_gradients(one: nn.Module, other: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("pin_memory", [True, False])
@pytest.mark.parametrize("on_disk", [False, True])
def test_many_steps_of_random_sizes_overlap_and_stay_equal(pin_memory: bool, on_disk: bool, tmp_path) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.GELU())]
    network = nn.Sequential(*layers).to(DEVICE)
    ours = copy.deepcopy(network)
    generator = random.Random(0)
    for window_bytes in (0, 1 << 20, "auto", 1 << 30):
        offloading = ActivationOffloading(
            ours,
            min_offload_bytes=1,
            window_bytes=window_bytes,
            pin_memory=pin_memory,
            disk_path=tmp_path if on_disk else None,
        )
        for _ in range(10 if on_disk else at_size(50, 10)):
            x = torch.randn(generator.randrange(1, at_size(4000, 300)), 512, device=DEVICE)
            network.zero_grad()
            network(x).float().square().mean().backward()
            ours.zero_grad()
            with offloading:
                loss = ours(x).float().square().mean()
            loss.backward()
            assert_equal_gradients(ours, network)
        offloading.close()


def test_the_allocator_holds_a_tenth_on_byte_gpt() -> None:
    torch.manual_seed(0)
    num_layers, width = at_size((8, 256), (4, 64))
    network = ByteGPT(num_layers, width, 4, width).to(DEVICE)
    tokens = torch.randint(256, (8, width), device=DEVICE)
    step(network, tokens, nullcontext())  # workspaces
    plain = step(network, tokens, nullcontext())
    offloading = ActivationOffloading(network, min_offload_bytes=at_size(1 << 20, 1 << 10))
    offloading.keep_in_place(tokens)
    step(network, tokens, offloading)
    logits = tokens.numel() * 256 * 4  # held by the loss that is held
    assert step(network, tokens, offloading) <= 0.10 * plain + logits
    host_bytes = offloading.report.host_bytes
    for _ in range(20):
        step(network, tokens, offloading)
    assert offloading.report.host_bytes == host_bytes
    offloading.close()
