"""What an estimate costs: seconds, and memory of the host.

Each case in a process of its own, which does nothing else. Seconds of the clock and of the processor without those of
imports; memory is the most the process ever had, imports among it. Of repeats the fastest counts: others work on the
machine.
"""

import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_vram import ActivationCheckpointing, estimate_memory
from lightning_vram.demos import ByteGPT
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row, measure_apart

SETTINGS: dict[str, Any] = {"repeats": 1}
QUICK: dict[str, Any] = {}
LENGTH = 1024
SHAPES = {"GPT-2 XL": (48, 1600, 25), "6.7 B": (32, 4096, 32)}
"""Layers, width, heads."""


def _lean() -> dict[str, Any]:
    return {"precision": "bf16-mixed", "callbacks": [ActivationCheckpointing()]}


def _sharded() -> dict[str, Any]:
    return {**_lean(), "strategy": "fsdp_offload"}


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "GPT-2 XL": ("GPT-2 XL", dict, {"find_limits": False}),
    "GPT-2 XL, checkpointed": ("GPT-2 XL", _lean, {"find_limits": False}),
    "GPT-2 XL, limits": ("GPT-2 XL", dict, {}),
    "GPT-2 XL, checkpointed, limits": ("GPT-2 XL", _lean, {}),
    "6.7 B": ("6.7 B", dict, {"find_limits": False}),
    "6.7 B, checkpointed, fsdp_offload, 8 devices": ("6.7 B", _sharded, {"find_limits": False, "devices": 8}),
}
"""Shape, arguments of the Trainer, arguments of the estimate."""


def estimate_case(name: str) -> Row:
    """Estimate one case in this process."""
    shape, make_trainer, arguments = CASES[name]
    num_layers, width, num_heads = SHAPES[shape]
    with torch.device("meta"):
        module = ByteGPT(num_layers=num_layers, width=width, num_heads=num_heads, sequence_length=LENGTH)
    batch = torch.zeros(4, LENGTH + 1, dtype=torch.int64)
    start, processor = time.perf_counter(), time.process_time()
    estimate = estimate_memory(module, batch, device="h100", trainer=make_trainer(), **arguments)
    return {
        "workload": name,
        "variant": "estimate_memory",
        "by": "ours",
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "needed_bytes": estimate.needed_bytes,
    }


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each case."""
    for name in list(CASES)[:1] if options.is_quick else CASES:
        if options.only in name:
            turns = [measure_apart(estimate_case, name) for _ in range(options["repeats"])]
            yield min(turns, key=lambda turn: float(turn.get("seconds", "inf")))
