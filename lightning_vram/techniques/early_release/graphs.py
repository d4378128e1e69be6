"""Graphs that outlive an evaluation, which has no backward to use them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_vram.memory.tracking.storages import iterate_storages
from lightning_vram.private_names.torch.autograd import saved_tensors_of
from lightning_vram.private_names.torch.tensors import ends_of_graph, storage_key
from lightning_vram.private_names.torch.trees import tensors_in


@dataclass(frozen=True)
class HeldGraph:
    """What tensors keep alive by the graph that they end.

    Args:
        num_bytes: Of the tensors that it saved for a backward, parameters and buffers not counted.
        first_layer: Name of the first layer whose parameters it goes back to; ``None`` if there is none.
    """

    num_bytes: int
    first_layer: str | None


def find_held_graph(outputs: Any, module: nn.Module) -> HeldGraph | None:
    """Look for a graph behind the outputs of a step.

    Args:
        outputs: Any nest of tensors.
        module: Whose step it was.

    Returns:
        The graph; ``None`` where there is none, or a backward has freed what it had saved.
    """
    roots = [node for tensor in tensors_in(outputs) for node in ends_of_graph(tensor)]
    if not roots:
        return None
    nodes = list(_iterate_nodes(roots))
    stays = {key for tensor in (*module.parameters(), *module.buffers()) for key in _sizes_of(tensor)}
    sizes: dict[int, int] = {}
    for node in nodes:
        for tensor in saved_tensors_of(node):
            sizes |= _sizes_of(tensor)
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


def _sizes_of(tensor: Tensor) -> dict[int, int]:
    return {storage_key(storage): storage.nbytes() for storage, _ in iterate_storages(tensor)}
