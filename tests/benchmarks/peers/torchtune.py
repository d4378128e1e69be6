"""torchtune's ``OffloadActivations``: what autograd saves goes to the host on a stream of its own.

torchtune 0.6.1 needs ``torchao<0.15``: later ones have moved what it imports.
"""

import importlib

from torch import nn

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.peers.layers import AroundForward
from tests.benchmarks.peers.pytorch import CHECKPOINT
from tests.benchmarks.ways import Way

MODULE = "torchtune.training._activation_offloading"
PIP = "torchtune 'torchao<0.15'"


def _offload(model: nn.Module) -> AroundForward:
    return AroundForward(importlib.import_module(MODULE).OffloadActivations)


def _checkpoint_and_offload(model: nn.Module) -> AroundForward:
    CHECKPOINT.change(model)
    return _offload(model)


_why_not = needs(MODULE, PIP)
ACTIVATIONS = (
    Way("OffloadActivations()", "torchtune", _offload, why_not=_why_not, pip=PIP),
    Way(
        "torch.utils.checkpoint, OffloadActivations()", "torchtune", _checkpoint_and_offload, why_not=_why_not, pip=PIP
    ),
)
