"""What recomputation keeps of well-known networks, and what its Python costs: a table of InPlaceFusion's page.

Run as ``python -m tests.benchmarks.recomputation -o FILE``. Bytes are tracked, exact, the same on every machine.
Overheads are paired: plain, a dispatch mode that does nothing, and recomputation take turns on tiny inputs, and the
fastest turn of each counts; per operator of the forward, forward and backward apart.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.in_place_fusion.recomputation.stage import Recomputation
from tests.benchmarks.measure import Row, describe_machine
from tests.support.networks import NETWORKS, Llama, make_network, resnet50


class Nothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The least that any dispatch mode costs; counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operators = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        return func(*args, **kwargs) if kwargs else func(*args)


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


def measure_shares(name: str, dtype: torch.dtype | None) -> Row:
    """Compare a step with recomputation, verified before, to a plain one."""
    network, x = make_network(name)
    plain = track_step(network, lambda: compute_loss(network, x, dtype), contextlib.nullcontext())
    recomputation = Recomputation(network)
    for _ in range(2):
        ours = track_step(network, lambda: compute_loss(network, x, dtype), recomputation)
    return {
        "network": name,
        "autocast": str(dtype) if dtype is not None else None,
        "plain_kept_bytes": plain[0],
        "kept_bytes": ours[0],
        "kept_share": ours[0] / plain[0],
        "plain_peak_bytes": plain[1],
        "peak_bytes": ours[1],
        "peak_share": ours[1] / plain[1],
    }


def measure_overhead(name: str, network: nn.Module, x: Tensor, num_turns: int) -> Row:
    """Time tiny steps: what is left is Python."""
    nothing = Nothing()
    contexts = {
        "plain": contextlib.nullcontext(),
        "empty mode": nothing,
        "recomputation": Recomputation(network, min_bytes=64),
    }
    num_operators = 0
    best = {key: [float("inf"), float("inf")] for key in contexts}
    for _ in range(num_turns):
        for key, context in contexts.items():
            network.zero_grad()
            nothing.num_operators = 0
            start = time.perf_counter()
            with context:
                loss = network(x).square().mean()
            middle = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            best[key] = [min(best[key][0], middle - start), min(best[key][1], end - middle)]
            num_operators = max(num_operators, nothing.num_operators)
    per_operator = {
        f"{key}, {part} us per operator": 1e6 * (best[key][index] - best["plain"][index]) / num_operators
        for key in ("empty mode", "recomputation")
        for index, part in enumerate(("forward", "backward"))
    }
    return {"network": name, "num_operators": num_operators, **per_operator}


class Chain(nn.Module):
    """Linear layers, norms, GELUs and residual sums on almost nothing: caches stay warm."""

    def __init__(self, num_layers: int = 50) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.num_layers = num_layers

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_layers):
            x = x + self.second(nn.functional.gelu(self.first(self.norm(x))))
        return x


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.recomputation", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; kept under tests/benchmarks/results/")
    parser.add_argument("--turns", type=int, default=30, help="of each variant (overhead)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shares = [measure_shares(name, dtype) for name in NETWORKS for dtype in (None, torch.bfloat16)]
    overheads = [
        measure_overhead("chain", Chain(), torch.randn(4, 8), arguments.turns),
        measure_overhead("resnet50, 2 x 32 x 32", resnet50(), torch.randn(2, 3, 32, 32), arguments.turns),
        measure_overhead("llama, 1 x 16", Llama(), torch.randint(0, 512, (1, 16)), arguments.turns),
    ]
    for row in [*shares, *overheads]:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.output is not None:
        result = {"machine": describe_machine(), "shares": shares, "overheads": overheads}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
