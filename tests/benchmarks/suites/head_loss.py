"""The head of a language model and its loss, forward and backward, beside others' losses: tracked bytes, and time.

Hidden states are a parameter, so that their gradient is made; nothing else is trained.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from lightning_vram.techniques.chunked_loss import apply_chunked_loss
from tests.benchmarks.cases import Workload
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row
from tests.benchmarks.peers import liger, pytorch
from tests.benchmarks.peers.layers import AroundForward
from tests.benchmarks.ways import Way

SETTINGS: dict[str, Any] = {"repeats": 5, "steps": 3}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 1}
Shape = tuple[int, int, int]
_CPU: tuple[Shape, ...] = ((2048, 256, 50257), (4096, 768, 50257))
GPU: tuple[Shape, ...] = ((16384, 4096, 128256), (16384, 2048, 248320))
TINY: tuple[Shape, ...] = ((256, 32, 5000),)


class Head(nn.Module):
    """Hidden states [N, D] and what makes logits [N, V] of them."""

    def __init__(self, num_tokens: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(num_tokens, width))
        self.head = nn.Linear(width, num_classes, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden)
        return logits


def _loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[0])


def workload_of(shape: Shape, device: torch.device) -> Workload:
    """Return the head of so many tokens, hidden numbers and classes; in bf16 but on a CPU."""
    num_tokens, width, num_classes = shape
    return Workload(
        f"{num_tokens} tokens x {width} x {num_classes} classes",
        partial(Head, *shape),
        lambda: (torch.randint(num_classes, (num_tokens,)),),
        _loss,
        autocast=torch.bfloat16 if device.type != "cpu" else None,
    )


def _no_step(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.0)


def _chunked(model: nn.Module, chunk: Any = "auto") -> AroundForward:
    return AroundForward(apply_chunked_loss(model, "head", chunk).active)


def _way(name: str, by: str, change: Callable[[nn.Module], object]) -> Way:
    return Way(name, by, change, make_optimizer=_no_step)


WAYS = (
    _way("plain", "plain", lambda model: None),
    _way("ChunkedLoss()", "ours", _chunked),
    _way("ChunkedLoss(chunk=1024)", "ours", partial(_chunked, chunk=1024)),
)


PEERS = tuple(replace(way, make_optimizer=_no_step) for way in (*pytorch.LOSSES, *liger.LOSSES))


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each shape and way."""
    shapes = TINY if options.is_quick else _CPU if options.device.type == "cpu" else GPU
    everybody = (*WAYS, *(PEERS if options.has_peers else ()))
    ways = [way for way in everybody if way.by == "plain" or options.ways in way.name]
    for workload in (workload_of(shape, options.device) for shape in shapes):
        if options.only in workload.name:
            yield from measure_ways(workload, ways, options.device, **options.turns)
