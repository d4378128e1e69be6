"""What is kept for nothing: gradients after a step, graphs of evaluations, cyclic garbage. May import: core, memory."""

import gc
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.patching import HeldSetting
from lightning_vram.memory.tracking.ledger import iterate_storages
from lightning_vram.private_names.torch import ends_of_graph, saved_tensors_of, storage_key, tensors_in


def _switch(is_automatic: bool) -> None:  # noqa: FBT001 - what a HeldSetting calls
    (gc.enable if is_automatic else gc.disable)()


_automatic = HeldSetting(gc.isenabled, _switch, value=False)
_held: set[int] = set()


def _collect_in_child() -> None:
    """Workers of data loaders are forked in training: they have no steps to collect after."""
    if _held:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collect_in_child)


class PacedCollection:
    """Collects after every n-th step; nothing collects by itself until :meth:`end`. Begins with a collection.

    Automatic collections come at different moments on each rank, and all others wait for that rank in the next
    collective. They count objects, not bytes: a cycle that holds a tensor may live for many steps. Prior art:
    ``GarbageCollection`` of torchtitan, ``ScheduledGarbageCollector`` of Composer.
    """

    def __init__(self, every_n_steps: int, step: int) -> None:
        self._every_n_steps = every_n_steps
        self._num_periods = step // every_n_steps
        self._is_holding = False
        self.resume()
        gc.collect()

    def note_step(self, step: int) -> None:
        """Collect if an n-th step was made since the last call. Several steps may have been made, or none."""
        num_periods = step // self._every_n_steps
        if num_periods != self._num_periods:
            gc.collect()
        self._num_periods = num_periods

    def resume(self) -> None:
        """Hold automatic collections off again, after :meth:`end`. Calling it again does nothing."""
        if not self._is_holding:
            _held.update({id(self)} if gc.isenabled() else ())
            _automatic.acquire()
        self._is_holding = True

    def end(self) -> None:
        """Let garbage be collected as it was before. Calling it again does nothing."""
        if self._is_holding:
            _automatic.release()
            _held.discard(id(self))
        self._is_holding = False


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes that gradients of ``parameters`` hold: those of their storages, each counted once."""
    return sum(storage_sizes(parameter.grad for parameter in parameters if parameter.grad is not None).values())


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage of ``tensors``."""
    storages = [storage for tensor in tensors for storage, _ in iterate_storages(tensor)]
    return {storage_key(storage): storage.nbytes() for storage in storages}


def unstepped_gradients(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """Return the parameters, by name, that have a gradient and no optimizer.

    A frozen teacher that runs in evaluation mode, but not under ``torch.no_grad()``, has such: the graph of its forward
    is kept for them, and no ``optimizer.zero_grad`` frees them.
    """
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and id(parameter) not in stepped
    }


@dataclass(frozen=True)
class HeldGraph:
    """What tensors keep alive by the graph that they end."""

    num_bytes: int  # of the tensors that it saved for a backward, parameters and buffers not counted
    first_layer: str | None  # name of the first layer whose parameters it goes back to; ``None`` if there is none


def find_held_graph(outputs: Any, module: nn.Module) -> HeldGraph | None:
    """Look for a graph behind the outputs of a step; ``None`` if there is none, or a backward has freed it."""
    roots = [node for tensor in tensors_in(outputs) for node in ends_of_graph(tensor)]
    if not roots:
        return None
    nodes = list(dict.fromkeys(roots))
    seen = set(nodes)
    for node in nodes:  # grows while it is iterated
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        nodes += following
    stays = storage_sizes((*module.parameters(), *module.buffers()))
    sizes: dict[int, int] = {}
    for node in nodes:
        for tensor in saved_tensors_of(node):  # hooks may make it anew: one at a time
            sizes |= storage_sizes([tensor])
    num_bytes = sum(size for key, size in sizes.items() if key not in stays)
    return HeldGraph(num_bytes, _first_layer(nodes, module)) if num_bytes else None


def _first_layer(nodes: list[Any], module: nn.Module) -> str | None:
    leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    names = (name for name, parameter in module.named_parameters() if id(parameter) in leaves)
    return next((name.rpartition(".")[0] for name in names), None)
