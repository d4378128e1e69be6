"""PyTorch by hand, as its pages have it: checkpointing, saving on the host, compilation."""

from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from tests.benchmarks.peers.installed import needs, on_host_alone
from tests.benchmarks.peers.layers import AroundForward, layers_of
from tests.benchmarks.ways import Way


def _checkpoint(model: nn.Module) -> None:
    for layer in layers_of(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def _checkpoint_selectively(model: nn.Module) -> None:
    """Results stay of the operators whose results ``save="matmuls"`` keeps."""
    operators = [operator for operator in SavePolicy("matmuls").resolved if isinstance(operator, OpOverload)]
    context_fn = partial(create_selective_checkpoint_contexts, operators)
    for layer in layers_of(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=context_fn)


def _save_on_cpu(model: nn.Module) -> AroundForward:
    return AroundForward(partial(save_on_cpu, pin_memory=True))


def _checkpoint_and_save_on_cpu(model: nn.Module) -> AroundForward:
    _checkpoint(model)
    return _save_on_cpu(model)


def _compile(model: nn.Module, budget: float = 1.0) -> None:
    """Compile in place; with a budget below one the partitioner keeps less for the backward."""
    from torch._functorch import config

    torch._dynamo.reset()
    config.activation_memory_budget = budget
    model.compile()


def _compiled(name: str, budget: float = 1.0) -> Way:
    why_not = needs(why="needs a GPU: the tracker sees nothing of compiled code")
    return Way(name, "PyTorch", partial(_compile, budget=budget), why_not=why_not, is_trackable=False)


def _linear_cross_entropy(model: nn.Module) -> AroundForward:
    """The head returns what it is given, and the loss multiplies by its weights, piece by piece."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    head.forward = _keep
    options = nn.LinearCrossEntropyOptions()

    def loss(hidden: Tensor, target: Tensor) -> Tensor:
        return F.linear_cross_entropy(hidden, head.weight, target, options=options)

    return AroundForward(partial(patch.object, F, "cross_entropy", loss))


def _keep(hidden: Tensor) -> Tensor:
    return hidden


def _has_linear_cross_entropy(device: torch.device) -> str | None:
    return None if hasattr(nn, "LinearCrossEntropyOptions") else "needs torch 2.13"


LOSSES = (
    Way("F.linear_cross_entropy, in chunks", "PyTorch", _linear_cross_entropy, why_not=_has_linear_cross_entropy),
)
CHECKPOINT = Way("torch.utils.checkpoint", "PyTorch", _checkpoint)
SELECTIVE = Way("torch.utils.checkpoint, selective", "PyTorch", _checkpoint_selectively)
SAVE_ON_CPU = Way("save_on_cpu", "PyTorch", _save_on_cpu, why_not=on_host_alone())
CHECKPOINT_ON_CPU = Way(
    "torch.utils.checkpoint, save_on_cpu", "PyTorch", _checkpoint_and_save_on_cpu, why_not=on_host_alone()
)
ACTIVATIONS = (CHECKPOINT, SELECTIVE, SAVE_ON_CPU, CHECKPOINT_ON_CPU)
COMPILED = (
    _compiled("torch.compile"),
    _compiled("torch.compile, activation_memory_budget=0.5", 0.5),
    _compiled("torch.compile, activation_memory_budget=0.2", 0.2),
)
