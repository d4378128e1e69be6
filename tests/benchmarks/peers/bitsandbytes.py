"""bitsandbytes' optimizers with states in eight bits; on a GPU the paged one's can be evicted to the host."""

import importlib
from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.optim import Optimizer

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.ways import Way

MODULE, PIP = "bitsandbytes.optim", "bitsandbytes"


def _make(parameters: Iterable[nn.Parameter], name: str) -> Optimizer:
    return getattr(importlib.import_module(MODULE), name)(parameters, lr=1e-4)


OPTIMIZERS = (
    Way(
        "bnb.AdamW8bit",
        "bitsandbytes",
        make_optimizer=partial(_make, name="AdamW8bit"),
        why_not=needs(MODULE, PIP, devices=("cpu", "cuda")),
        pip=PIP,
    ),
    Way(
        "bnb.PagedAdamW8bit",
        "bitsandbytes",
        make_optimizer=partial(_make, name="PagedAdamW8bit"),
        why_not=needs(MODULE, PIP, why="needs a GPU: nothing is paged on the CPU"),
        pip=PIP,
    ),
)
