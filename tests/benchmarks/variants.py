"""What others do to a model before it is measured."""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.core.layers.selection import select_layers
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy

Variant = Callable[[nn.Module], object]
"""Changes a model; a context manager that it returns is entered for every forward."""


def _checkpoint_by_hand(model: nn.Module) -> None:
    """As a user would in the model's code, without what ours looks after."""
    for layer in select_layers(model).layers:
        plain = layer.module.forward
        layer.module.forward = partial(checkpoint, plain, use_reentrant=False)


def _checkpoint_selectively_by_hand(model: nn.Module) -> None:
    """The same, and results of the operators stay that ``save="matmuls"`` keeps."""
    operators = [operator for operator in SavePolicy("matmuls").resolved if isinstance(operator, OpOverload)]
    context_fn = partial(create_selective_checkpoint_contexts, operators)
    for layer in select_layers(model).layers:
        plain = layer.module.forward
        layer.module.forward = partial(checkpoint, plain, use_reentrant=False, context_fn=context_fn)


class _SaveOnCpu:
    def __enter__(self) -> None:
        self._hooks = save_on_cpu(pin_memory=True)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _torchtune_offload(model: nn.Module) -> object:
    module = importlib.import_module("torchtune.training._activation_offloading")
    return _Fresh(lambda: module.OffloadActivations())


class _Fresh:
    """A new context for each forward."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._context: AbstractContextManager[object] = nullcontext()

    def __enter__(self) -> None:
        self._context = self._make()
        self._context.__enter__()

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)


GPU_PEERS: dict[str, Variant] = {
    "torch checkpoint by hand": _checkpoint_by_hand,
    "torch selective checkpoint by hand": _checkpoint_selectively_by_hand,
    "save_on_cpu": lambda model: _SaveOnCpu(),
}
"""Others' ways to the same end, where they differ from plain: on a GPU."""

if importlib.util.find_spec("torchtune") is not None:
    GPU_PEERS["torchtune OffloadActivations"] = _torchtune_offload


def _compile(model: nn.Module, budget: float = 1.0) -> None:
    """Compile in place; with a budget below one the partitioner keeps less for the backward."""
    from torch._functorch import config

    torch._dynamo.reset()
    config.activation_memory_budget = budget
    model.compile()


COMPILED_VARIANTS: dict[str, Variant] = {
    "compiled": _compile,
    "compiled, activation_memory_budget=0.5": partial(_compile, budget=0.5),
}
"""Peers that take minutes to compile and are worth it on a GPU only."""
