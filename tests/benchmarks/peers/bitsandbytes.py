"""bitsandbytes: optimizer states in eight bits, which the paged one can evict to the host; frozen weights in NF4."""

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


def _freeze_in_four_bits(model: nn.Module) -> None:
    layer = importlib.import_module("bitsandbytes.nn").LinearNF4
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    tied = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear and id(child.weight) not in tied:
                made = layer(child.in_features, child.out_features, bias=child.bias is not None)
                made.load_state_dict(child.state_dict())
                made.requires_grad_(False)
                if child.bias is not None:
                    made.bias = child.bias
                setattr(part, name, made.to(child.weight.device))  # which packs


WEIGHTS = (
    Way(
        "bnb.LinearNF4, frozen layers",
        "bitsandbytes",
        change=_freeze_in_four_bits,
        why_not=needs("bitsandbytes.nn", PIP, devices=("cpu", "cuda")),
        pip=PIP,
    ),
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
