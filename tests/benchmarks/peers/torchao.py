"""torchao: optimizers with states in few bits, the one that steps on the host, and frozen weights in few bits."""

import importlib
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.peers.layers import frozen_linears
from tests.benchmarks.ways import Way

MODULE, PIP = "torchao.optim", "torchao"


def _low_bit(parameters: Iterable[nn.Parameter], name: str) -> Optimizer:
    """Its step is compiled, and refuses to run under a dispatch mode: what is tracked runs as it is written."""
    optimizer: Optimizer = getattr(importlib.import_module(MODULE), name)(parameters, lr=1e-4)
    step = optimizer.step

    def step_anywhere(*arguments: Any, **options: Any) -> Any:
        is_tracked = _get_current_dispatch_mode() is not None
        with torch.compiler.set_stance("force_eager") if is_tracked else nullcontext():
            return step(*arguments, **options)

    optimizer.step = step_anywhere
    return optimizer


def _on_host(parameters: Iterable[nn.Parameter]) -> Optimizer:
    kind = importlib.import_module(MODULE).CPUOffloadOptimizer
    return kind(list(parameters), torch.optim.AdamW, offload_gradients=True, fused=True, lr=1e-4)


def _in_few_bits(model: nn.Module, name: str) -> None:
    quantization = importlib.import_module("torchao.quantization")
    frozen = frozen_linears(model)
    quantization.quantize_(model, getattr(quantization, name)(), lambda module, path: path in frozen)


_anywhere = needs(MODULE, PIP, devices=())
OPTIMIZERS = tuple(
    Way(name, "torchao", make_optimizer=partial(_low_bit, name=name), why_not=_anywhere, pip=PIP)
    for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
)
WEIGHTS = tuple(
    Way(
        f"torchao {name}()",
        "torchao",
        partial(_in_few_bits, name=name),
        why_not=needs("torchao.quantization", PIP, devices=devices),
        pip=PIP,
    )
    for name, devices in (("Int8WeightOnlyConfig", ()), ("Int4WeightOnlyConfig", ("cuda",)))
)
OFFLOAD = (
    Way(
        "CPUOffloadOptimizer(offload_gradients=True)",
        "torchao",
        make_optimizer=_on_host,
        why_not=needs(MODULE, PIP, devices=("cuda", "xpu")),
        pip=PIP,
    ),
)
