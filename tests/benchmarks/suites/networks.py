"""What recomputation keeps of well-known networks: tracked bytes, exact, the same on every machine."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row
from tests.support.networks import NETWORKS, make_network

SETTINGS: dict[str, Any] = {}
QUICK: dict[str, Any] = {}
QUICK_NETWORK = "mobilenetv2"


def measure(options: Options) -> Iterator[Row]:
    """Yield two rows for each network and format: plain, and with recomputation."""
    torch.manual_seed(0)
    for name in [QUICK_NETWORK] if options.is_quick else NETWORKS:
        for dtype in (None, torch.bfloat16):
            workload = f"{name}, {'fp32' if dtype is None else 'bf16 autocast'}"
            if options.only in workload:
                plain, ours = measure_network(name, dtype)
                yield {"workload": workload, "variant": "plain", "by": "plain", **plain}
                yield {"workload": workload, "variant": "InPlaceFusion()", "by": "ours", **ours}


def compute_loss(network: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    with torch.autocast(x.device.type, dtype) if dtype is not None else contextlib.nullcontext():
        return network(x).float().square().mean()


def track_step(
    network: nn.Module, forward: Callable[[], Tensor], context: AbstractContextManager[object]
) -> tuple[int, int]:
    """Return the bytes kept for backward and the peak of the step; parameters, gradients and buffers do not count."""
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with track_memory() as tracker:
        with context:
            loss = forward()
        kept = tracker.timeline.live_bytes
        loss.backward()
    return kept, tracker.timeline.peak_bytes


def measure_network(name: str, dtype: torch.dtype | None) -> tuple[Row, Row]:
    """Return the bytes of a plain step, and of one with recomputation, which was verified before."""
    network, x = make_network(name)
    plain = track_step(network, lambda: compute_loss(network, x, dtype), contextlib.nullcontext())
    recomputation = Recomputation(network)
    for _ in range(2):
        ours = track_step(network, lambda: compute_loss(network, x, dtype), recomputation)
    rows = ({"saved_for_backward_bytes": kept, "peak_bytes": peak} for kept, peak in (plain, ours))
    shares = ((1.0, 1.0), (ours[0] / plain[0], ours[1] / plain[1]))
    first, second = (
        {**row, "saved_of_first": kept, "peak_of_first": peak} for row, (kept, peak) in zip(rows, shares, strict=True)
    )
    return first, second
