"""What is done to a model before it is measured: our techniques, combinations of them, and peers."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_vram.core.layers.selection import select_layers
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.budget.apply import BudgetedCheckpointing, decisions_of
from lightning_vram.techniques.activation_checkpointing.budget.solver import BudgetError, predict_peak, solve
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading
from lightning_vram.techniques.in_place_fusion.recomputation.stage import Recomputation

Variant = Callable[[nn.Module], object]
"""Changes a model; a context manager that it returns is entered for every forward."""


class Budget:
    """Checkpoints to a share of the plain peak: the first forward is watched, the others run by the plan."""

    def __init__(self, model: nn.Module, share: float) -> None:
        self._model = model
        self._share = share
        self._handle = apply_activation_checkpointing(model)
        self._is_planned = False
        self._stack = ExitStack()

    def __enter__(self) -> None:
        if not self._is_planned:
            self._stack.enter_context(self._planning())

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def _planning(self) -> Iterator[None]:
        watched = BudgetedCheckpointing(self._model, self._handle, 1 << 62)
        with watched.observing():
            yield
        profile = watched.plan().profile
        plain_bytes = predict_peak(profile, [layer.choose(None) for layer in profile.layers])
        try:
            watched.apply(decisions_of(solve(profile, int(self._share * plain_bytes))))
        except BudgetError:
            watched.apply({})  # everything checkpointed
        self._is_planned = True


class _Several:
    """Contexts as one, entered again for each forward."""

    def __init__(self, *contexts: AbstractContextManager[object]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _offload(model: nn.Module, **arguments: object) -> ActivationOffloading:
    return ActivationOffloading(model, min_offload_bytes=64 * 1024, **arguments)


def _checkpoint_and_offload(model: nn.Module, save: SavePolicy | None = None) -> ActivationOffloading:
    apply_activation_checkpointing(model, save=save)
    return _offload(model)


def _fuse_and_offload(model: nn.Module) -> _Several:
    return _Several(_offload(model), Recomputation(model))


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


VARIANTS: dict[str, Variant] = {
    "plain": lambda model: None,
    "InPlaceFusion": Recomputation,
    "checkpointed": apply_activation_checkpointing,
    "checkpointed, every 2nd": partial(apply_activation_checkpointing, every_n_layers=2),
    "checkpointed, matmuls kept": partial(apply_activation_checkpointing, save=SavePolicy("matmuls")),
    "checkpointed, every 2nd matmul kept": partial(apply_activation_checkpointing, save=SavePolicy("matmuls", 2)),
    "checkpointed, budget 0.75": partial(Budget, share=0.75),
    "checkpointed, budget 0.5": partial(Budget, share=0.5),
    "checkpointed, budget 0.3": partial(Budget, share=0.3),
    "offloaded": _offload,
    "checkpointed, offloaded": _checkpoint_and_offload,
    "checkpointed, matmuls kept and offloaded": partial(_checkpoint_and_offload, save=SavePolicy("matmuls")),
    "InPlaceFusion, offloaded": _fuse_and_offload,
    "compressed": CompressionStage,
    "compressed, int8": partial(CompressionStage, lossy="int8"),
}

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
