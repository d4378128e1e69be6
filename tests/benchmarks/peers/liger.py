"""Liger's losses, put in place of PyTorch's while a forward runs, as Liger itself patches models."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.nn import functional as F

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.peers.layers import AroundForward
from tests.benchmarks.ways import Way

MODULE, PIP = "liger_kernel.transformers", "liger-kernel"


@contextmanager
def _in_place_of_cross_entropy(loss: Any) -> Iterator[None]:
    with patch.object(F, "cross_entropy", loss):
        yield


def _cross_entropy(model: nn.Module) -> AroundForward:
    loss = importlib.import_module(MODULE).LigerCrossEntropyLoss()
    return AroundForward(partial(_in_place_of_cross_entropy, loss))


def _keep(hidden: Tensor) -> Tensor:
    return hidden


def _fused_linear(model: nn.Module) -> AroundForward:
    """The head returns what it is given, and the loss multiplies by its weights, piece by piece."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    head.forward = _keep
    fused = importlib.import_module(MODULE).LigerFusedLinearCrossEntropyLoss()

    def loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return fused(head.weight, hidden, targets, head.bias)

    return AroundForward(partial(_in_place_of_cross_entropy, loss))


_why_not = needs(MODULE, PIP)
LOSSES = (
    Way("LigerCrossEntropyLoss", "Liger", _cross_entropy, why_not=_why_not, pip=PIP),
    Way("LigerFusedLinearCrossEntropyLoss", "Liger", _fused_linear, why_not=_why_not, pip=PIP),
)
