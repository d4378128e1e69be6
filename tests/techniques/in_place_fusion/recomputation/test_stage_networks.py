"""The share of the bytes kept for backward, and equality to the bit after two steps, on well-known networks."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.networks import NETWORKS, make_network

from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation
from tests.benchmarks.suites.networks import compute_loss, measure_network

# Bounds of the bytes kept and of the peak of the step, as shares of plain.
KEPT = {
    "resnet50": (0.56, 0.61),
    "mobilenetv2": (0.36, 1.0),
    "densenet121": (0.25, 1.0),
    "convnext_tiny": (0.52, 1.0),
    "vit_small": (0.63, 1.0),
    "llama": (0.57, 1.0),
}
KEPT_IN_BF16 = {"resnet50": (0.30, 1.0), "vit_small": (0.42, 1.0), "llama": (0.43, 1.0)}


@pytest.mark.slow_except("vit_small-None")
@pytest.mark.parametrize(
    ("name", "dtype", "bounds"),
    [
        pytest.param(name, dtype, bounds, id=f"{name}-{dtype}")
        for dtype, table in ((None, KEPT), (torch.bfloat16, KEPT_IN_BF16))
        for name, bounds in table.items()
    ],
)
def test_share_of_the_bytes_kept_for_backward(
    name: str, dtype: torch.dtype | None, bounds: tuple[float, float]
) -> None:
    row = measure_network(name, dtype)[1]
    assert row["saved_of_first"] <= bounds[0], row
    assert row["peak_of_first"] <= bounds[1], row


@pytest.mark.slow_except("mobilenetv2-float32")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bf16 autocast"])
@pytest.mark.parametrize("name", NETWORKS)
def test_two_steps_leave_weights_and_buffers_equal_to_the_bit(name: str, dtype: torch.dtype | None) -> None:
    if name == "vgg13_bn" and dtype is not None:
        pytest.skip("its images cannot be small, and a CPU without AVX-512 takes minutes for convolutions in bfloat16")
    network, x = make_network(name)
    x = x[:2] if x.dim() == 2 else x[:2, :, ::2, ::2] if name not in ("vit_small", "vgg13_bn") else x[:2]
    other = copy.deepcopy(network)
    recomputation = Recomputation(other)
    for module, context in ((network, nullcontext()), (other, recomputation)):
        optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
        torch.manual_seed(1)
        for _ in range(2):
            with context:
                loss = compute_loss(module, x, dtype)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert recomputation.report.num_dropped > 0
    assert not recomputation.report.differing
    for (key, a), b in zip(network.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
