"""What the package costs in Python, on tiny layers: python -m tests.benchmarks.python_price.

Processor time of one thread, forward and backward. Variants take turns, and the fastest turn of each counts beside the
median: others work on the machine. Calls of Python functions are counted as well, which is exact.
"""

import argparse
import copy
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from tests.benchmarks.measure import Row, describe_machine
from tests.benchmarks.recomputation import Chain, measure_overhead

WIDTH, NUM_ROWS = 8, 4
NUM_WARM_UP = 3  # calls in which a layer is learned and compared
STEP = Path(__file__).with_name("trainer_step.py")

LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear, norm, GELU": lambda: [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Identity()],
    "with dropout": lambda: [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)],
    "with buffers": lambda: [nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Identity()],
    "with both": lambda: [nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)],
}
"""Half of what a layer of eight modules is made of."""

SAVES: dict[str, SavePolicy | None] = {"inputs": None, "matmuls": SavePolicy("matmuls")}


class Layer(nn.Module):
    """Eight modules in turn, as a user writes it."""

    def __init__(self, make_half: Callable[[], list[nn.Module]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([*make_half(), *make_half()])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def make_variants(make_half: Callable[[], list[nn.Module]], save: SavePolicy | None) -> dict[str, Callable[[], None]]:
    """Forward and backward: of the plain layer, under torch's checkpoint, under ours."""
    plain = Layer(make_half)
    by_torch, ours = copy.deepcopy(plain), nn.ModuleList([copy.deepcopy(plain)])
    apply_activation_checkpointing(ours, layers="0", save=save)
    options: dict[str, Any] = {"use_reentrant": False}
    if save is not None:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(save.resolved))
    x = torch.randn(NUM_ROWS, WIDTH, requires_grad=True)
    gradient = torch.ones(NUM_ROWS, WIDTH)
    return {
        "plain": lambda: plain(x).backward(gradient),
        "torch": lambda: checkpoint(by_torch, x, **options).backward(gradient),
        "ours": lambda: ours[0](x).backward(gradient),
    }


def count_calls(run: Callable[[], object]) -> int:
    """Return how many Python functions are called."""
    number = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return number - 1  # run itself


def time_in_turns(variants: dict[str, Callable[[], None]], num_turns: int, num_calls: int) -> dict[str, list[float]]:
    """Return, for each variant, the microseconds per call of each turn."""
    turns: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(num_turns):
        for name, run in variants.items():
            start = time.process_time()
            for _ in range(num_calls):
                run()
            turns[name].append(1e6 * (time.process_time() - start) / num_calls)
    return turns


def measure_checkpointing(layer: str, save: str, num_turns: int, num_calls: int) -> Row:
    variants = make_variants(LAYERS[layer], SAVES[save])
    for run in variants.values():
        for _ in range(NUM_WARM_UP):
            run()
    calls = {name: count_calls(run) for name, run in variants.items()}
    turns = time_in_turns(variants, num_turns, num_calls)
    row: Row = {"what": "checkpointed layer", "layer": layer, "save": save}
    row |= {f"{name}, Python calls": number for name, number in calls.items()}
    row |= {f"{name}, us (fastest)": min(times) for name, times in turns.items()}
    row |= {f"{name}, us (median)": statistics.median(times) for name, times in turns.items()}
    ratios = [ours / by_torch for ours, by_torch in zip(turns["ours"], turns["torch"], strict=True)]
    row["ours of torch (fastest)"] = min(turns["ours"]) / min(turns["torch"])
    row["ours of torch (median of turns)"] = statistics.median(ratios)
    return row


def measure_nothing(num_turns: int) -> Row:
    """A Trainer's steps, with the package imported and without: whole processes in turn."""
    runs: dict[str, list[dict[str, float]]] = {"without": [], "imported": []}
    for _ in range(num_turns):
        for name, found in runs.items():
            done = subprocess.run([sys.executable, STEP, name], capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    row: Row = {"what": "a Trainer's step, nothing switched on"}
    for name, found in runs.items():
        row[f"{name}, Python calls"] = found[0]["calls"]
        row[f"{name}, us (fastest)"] = min(run["us"] for run in found)
    row["imported of without (fastest)"] = row["imported, us (fastest)"] / row["without, us (fastest)"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.python_price", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; kept under tests/benchmarks/results/")
    parser.add_argument("--turns", type=int, default=200, help="of each variant")
    parser.add_argument("--calls", type=int, default=10, help="in each turn")
    parser.add_argument("--only", default="", help="part of a layer's name, or 'fusion' or 'nothing'")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: list[Row] = []
    for save in SAVES:
        for layer in LAYERS:
            if arguments.only in layer:
                rows.append(measure_checkpointing(layer, save, arguments.turns, arguments.calls))
    if arguments.only in "fusion":
        fusion = measure_overhead("chain", Chain(), torch.randn(4, 8), arguments.turns)
        rows.append({"what": "InPlaceFusion", **fusion})
    if arguments.only in "nothing":
        rows.append(measure_nothing(num_turns=5))
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.output is not None:
        result = {"suite": "python_price", "machine": describe_machine(), "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
