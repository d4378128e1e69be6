"""bitsandbytes: optimizer states in eight bits, which the paged one can evict to the host; frozen weights in few."""

import importlib
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.peers.layers import frozen_linears
from tests.benchmarks.ways import Way

MODULE, PIP = "bitsandbytes.optim", "bitsandbytes"


def _make(parameters: Iterable[nn.Parameter], name: str) -> Optimizer:
    return getattr(importlib.import_module(MODULE), name)(parameters, lr=1e-4)


def _in_few_bits(model: nn.Module, name: str, **options: Any) -> None:
    kind = getattr(importlib.import_module("bitsandbytes.nn"), name)
    for path, linear in frozen_linears(model).items():
        made = kind(linear.in_features, linear.out_features, bias=linear.bias is not None, **options)
        made.load_state_dict(linear.state_dict())
        model.set_submodule(path, made.requires_grad_(False).to(linear.weight.device))  # which packs


WEIGHTS = tuple(
    Way(
        f"bnb.{name}",
        "bitsandbytes",
        partial(_in_few_bits, name=name, **options),
        why_not=needs("bitsandbytes.nn", PIP, devices=("cpu", "cuda")),
        pip=PIP,
    )
    for name, options in (("Linear8bitLt", {"has_fp16_weights": False}), ("LinearNF4", {}))
)
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
