"""Graphs that outlive an evaluation, which has no backward to use them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_vram.private_names.torch.autograd import saved_tensors_of
from lightning_vram.private_names.torch.tensors import ends_of_graph
from lightning_vram.private_names.torch.trees import tensors_in
from lightning_vram.techniques.early_release.gradients import storage_sizes


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
    nodes = list(_iterate_nodes(roots))
    stays = storage_sizes((*module.parameters(), *module.buffers()))
    sizes = storage_sizes(tensor for node in nodes for tensor in saved_tensors_of(node))
    num_bytes = sum(size for key, size in sizes.items() if key not in stays)
    return HeldGraph(num_bytes, _first_layer(nodes, module)) if num_bytes else None


def _iterate_nodes(roots: list[Any]) -> Iterator[Any]:
    seen, waiting = set(roots), list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        waiting += following


def _first_layer(nodes: list[Any], module: nn.Module) -> str | None:
    leaves = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    names = (name for name, parameter in module.named_parameters() if id(parameter) in leaves)
    name = next(names, None)
    return None if name is None else name.rpartition(".")[0]
