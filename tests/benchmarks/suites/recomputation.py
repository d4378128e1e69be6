"""What the Python of recomputation costs, per operator of the forward.

Paired: plain, a dispatch mode that does nothing, and recomputation take turns on tiny inputs, and the fastest turn of
each counts; forward and backward apart.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row
from tests.support.networks import Llama, resnet50

SETTINGS: dict[str, Any] = {"turns": 30}
QUICK: dict[str, Any] = {"turns": 3}


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each network."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases: dict[str, tuple[nn.Module, Tensor]] = {"chain": (Chain(), torch.randn(4, 8))}
    if not options.is_quick:
        cases["resnet50, 2 x 32 x 32"] = resnet50(), torch.randn(2, 3, 32, 32)
        cases["llama, 1 x 16"] = Llama(), torch.randint(0, 512, (1, 16))
    for name, (network, x) in cases.items():
        if options.only in name:
            overhead = measure_overhead(network, x, options["turns"])
            yield {"workload": name, "variant": "InPlaceFusion()", "by": "ours", **overhead}


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


def measure_overhead(network: nn.Module, x: Tensor, num_turns: int) -> Row:
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
    return {"num_operators": num_operators, **per_operator}


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
