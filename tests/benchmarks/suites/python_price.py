"""What the package costs in Python, on tiny layers.

Processor time of one thread, forward and backward. Variants take turns, and the fastest turn of each counts beside the
median: others work on the machine. Calls of Python functions are counted as well, which is exact.
"""

import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row, compare_seconds, in_turns, time_call

SETTINGS: dict[str, Any] = {"turns": 200, "calls": 10}  # of each variant, and in each turn
QUICK: dict[str, Any] = {"turns": 5}
WIDTH, NUM_ROWS = 8, 4
NUM_WARM_UP = 4  # calls in which a layer is learned; the fifth is not compared

LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear, norm, GELU": lambda: [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Identity()],
    "with dropout": lambda: [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)],
    "with buffers": lambda: [nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Identity()],
    "with both": lambda: [nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)],
}
"""Half of what a layer of eight modules is made of."""

SAVES: dict[str, SavePolicy | None] = {"inputs": None, "matmuls": SavePolicy("matmuls")}
NAMES = {
    "plain": ("plain", "plain"),
    "torch": ("torch.utils.checkpoint", "PyTorch"),
    "ours": ("ActivationCheckpointing()", "ours"),
}
"""What rows call the variants, and whose they are."""


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
        options["context_fn"] = partial(create_selective_checkpoint_contexts, list(save.resolved))
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


def measure_checkpointing(layer: str, save: str, num_turns: int, num_calls: int) -> Iterator[Row]:
    """Yield a row for each variant of a layer."""
    variants = make_variants(LAYERS[layer], SAVES[save])
    for run in variants.values():
        for _ in range(NUM_WARM_UP):
            run()
    calls = {name: count_calls(run) for name, run in variants.items()}
    turns = in_turns({name: partial(_time_calls, run, num_calls) for name, run in variants.items()}, num_turns)
    for name, (variant, by) in NAMES.items():
        yield {
            "workload": f"layer of eight modules, {layer}, {save} kept",
            "variant": variant,
            "by": by,
            **compare_seconds(turns[name], turns["plain"]),
            "of_torch": statistics.median(one / other for one, other in zip(turns[name], turns["torch"], strict=True)),
            "fastest_of_torch": min(turns[name]) / min(turns["torch"]),
            "python_calls": calls[name],
        }


def _time_calls(run: Callable[[], None], num_calls: int) -> float:
    """Seconds of the processor for a call."""
    return time_call(lambda: [run() for _ in range(num_calls)], time.process_time) / num_calls


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each layer, save policy and variant."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for save, layer in itertools.product(SAVES, list(LAYERS)[:1] if options.is_quick else LAYERS):
        if options.only in layer:
            yield from measure_checkpointing(layer, save, options["turns"], options["calls"])
