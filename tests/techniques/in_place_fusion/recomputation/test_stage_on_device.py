"""Kernels give the same bits a second time, or their results are kept; and the allocator agrees."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.devices import DEVICE, device_module, requested_bytes
from support.networks import NETWORKS, make_network
from torch import Tensor, nn

from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("deterministic_kernels")]

KEPT = {"resnet50": 0.60, "llama": 0.65}
"""Largest share of what plain requests for the backward. Bounds of the host, with room for what kernels keep."""


def step(network: nn.Module, x: Tensor, dtype: torch.dtype | None, recomputation: Recomputation | None) -> int:
    """Take a step of gradients; return the bytes that were requested for the backward."""
    before = requested_bytes()
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None), recomputation or nullcontext():
        loss = network(x).float().square().mean()
    kept = requested_bytes() - before
    loss.backward()
    return kept


@pytest.mark.slow_except("resnet50-None-nchw", "vit_small-torch.bfloat16-nchw")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_buffers_are_equal_to_the_bit(name: str, dtype: torch.dtype | None, layout: torch.memory_format):
    network, x = make_network(name)
    if x.dim() == 2 and layout is torch.channels_last:
        pytest.skip("tokens have one layout")
    network, x = network.to(DEVICE), x.to(DEVICE)
    if x.dim() == 4:
        network, x = network.to(memory_format=layout), x.contiguous(memory_format=layout)
    ours = copy.deepcopy(network)
    recomputation = Recomputation(ours)
    for seed in range(3):
        for module, chosen in ((network, None), (ours, recomputation)):
            torch.manual_seed(seed)
            module.zero_grad()
            step(module, x, dtype, chosen)
        for (key, a), b in zip(network.named_parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad), key
        for (key, a), b in zip(network.named_buffers(), ours.buffers(), strict=True):
            assert torch.equal(a, b), key
    assert recomputation.report.num_dropped > 0


@pytest.mark.parametrize("name", KEPT)
def test_the_allocator_holds_the_promised_share(name: str):
    network, x = make_network(name)
    network, x = network.to(DEVICE), x.to(DEVICE)
    step(network, x, None, None)  # workspaces
    plain = step(network, x, None, None)
    recomputation = Recomputation(network)
    step(network, x, None, recomputation)
    assert step(network, x, None, recomputation) <= KEPT[name] * plain


@pytest.mark.gpu  # what the recipe says is CUDA's kernel
@pytest.mark.parametrize("dropout", ["mask", "replay"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("probability", [0.15, 0.5])
def test_dropout_is_made_again_to_the_bit(dropout, dtype: torch.dtype, probability: float):
    weight = torch.randn(256, 256, device=DEVICE, dtype=dtype).requires_grad_()
    grads = []
    for recomputation in (None, Recomputation(min_bytes=0, dropout=dropout, verify="never")):
        torch.manual_seed(0)
        with recomputation or nullcontext():
            loss = (F.dropout(F.silu(weight @ weight), probability) @ weight).float().square().mean()
        grads.append(torch.autograd.grad(loss, weight)[0])
        state = device_module().get_rng_state()
    assert torch.equal(*grads)
    assert torch.equal(device_module().get_rng_state(), state)


@pytest.mark.gpu
@pytest.mark.distributed
def test_synchronized_norms_are_made_again_without_more_communication():
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        network, x = make_network("mobilenetv2")
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network).to(DEVICE)
        ours = copy.deepcopy(network)
        step(network, x.to(DEVICE), None, None)
        recomputation = Recomputation(ours)
        step(ours, x.to(DEVICE), None, recomputation)
        for a, b in zip(network.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        assert recomputation.report.num_dropped > 0
    finally:
        torch.distributed.destroy_process_group()
