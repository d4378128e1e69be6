"""What an estimate costs: seconds, and memory of the host: python -m tests.benchmarks.estimate_cost.

Each case in a process of its own, which does nothing else. Seconds of the clock and of the processor without those of
imports; memory is the most the process ever had, imports among it. With ``--repeats`` the fastest counts: others work
on the machine.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lightning_vram import ActivationCheckpointing, estimate_memory
from lightning_vram.demos import ByteGPT
from tests.benchmarks.measure import Row, describe_machine
from tests.benchmarks.report import make_table

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


def measure(name: str) -> Row:
    """Estimate one case in this process."""
    shape, make_trainer, arguments = CASES[name]
    num_layers, width, num_heads = SHAPES[shape]
    with torch.device("meta"):
        module = ByteGPT(num_layers=num_layers, width=width, num_heads=num_heads, sequence_length=LENGTH)
    batch = torch.zeros(4, LENGTH + 1, dtype=torch.int64)
    start, processor = time.perf_counter(), time.process_time()
    estimate = estimate_memory(module, batch, device="h100", trainer=make_trainer(), **arguments)
    return {
        "name": name,
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "needed_bytes": estimate.needed_bytes,
    }


def measure_apart(name: str) -> Row:
    """The same in a new process."""
    command = [sys.executable, "-m", "tests.benchmarks.estimate_cost", "--inside", name]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    row: Row = json.loads(answer.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.estimate_cost", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; kept under tests/benchmarks/results/")
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(arguments.inside)))
        return
    rows = []
    for name in CASES:
        if arguments.only in name:
            turns = [measure_apart(name) for _ in range(arguments.repeats)]
            rows.append(min(turns, key=lambda turn: float(turn["seconds"])))
    Console(width=160).print(make_table(rows))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
