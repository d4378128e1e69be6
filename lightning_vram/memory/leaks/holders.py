"""What keeps the storages of a step alive that has long ended."""

import gc
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_vram.memory.leaks.births import Births, storages_of
from lightning_vram.memory.leaks.referrers import Link, describe_chain, find_chains, is_a, is_table_of_attributes
from lightning_vram.memory.leaks.watch import live_tensors
from lightning_vram.private_names.torch.autograd import number_of
from lightning_vram.private_names.torch.tensors import ends_of_graph, storage_key

_MAX_TARGETS = 16
_LEAST_PART = 100  # of the largest: sums that Lightning logs are new in each epoch, too
_MAX_NODES = 200_000


@dataclass(frozen=True)
class Holder:
    """What keeps storages alive."""

    path: str  # as one would write it in code: ``self.losses``
    container: str  # class of the container whose items they are; empty if it is one tensor
    num_items: int  # of the container
    num_graphs: int  # how many of the items have the graph that made them
    has_graph: bool  # whether the graph of the step is kept, which seldom is meant
    is_metric: bool  # whether it is the state of a metric, which goes with the metric's ``reset``
    is_bounded: bool  # whether it is in a deque with a length, which is no leak however long it fills
    is_measured: bool = False  # whether only its size tells: it grows, and what it held is not followed

    def __str__(self) -> str:
        """One sentence, and what to do."""
        if self.is_measured:
            what = f"a {self.container} of {self.num_items} items" if self.container else "reallocated at each step"
            return f"{self.path}: {what}, larger each time. Clear it, or limit its length."
        if self.is_metric:
            what = f"list state of a metric, {self.num_items} items" if self.container else "state of a metric"
            if self.has_graph:
                return f"{self.path}: {what}, with autograd graph. Call metric.update(preds.detach(), ...) instead."
            return f"{self.path}: {what}. reset() was not called. MetricOffload() moves such lists to the host."
        if not self.has_graph:
            what = f"a {self.container} of {self.num_items} items" if self.container else "a tensor for each step"
            return f"{self.path}: {what}. Clear it, limit its length, or move its tensors to the host."
        if not self.container:
            return f"{self.path}: a tensor whose autograd graph spans all steps. Add value.detach() to it instead."
        graphs = f"{self.num_graphs} with their autograd graph" if self.num_graphs else "with autograd graph"
        return f"{self.path}: a {self.container} of {self.num_items} items, {graphs}. Store value.detach() instead."


def find_holders(births: Births, names: Mapping[int, str]) -> list[Holder]:
    """Name what keeps the storages that are left of a step, unless only C++ sees it. Takes some tenths of a second."""
    gc.collect()  # what only a cycle keeps is kept by nobody
    targets, with_graph = _targets(births)
    found: dict[str, Holder] = {}
    for chain in find_chains(targets, names, ignored=[targets]):
        holder = _describe(chain, names, has_graph=not chain.covers.isdisjoint(with_graph))
        found.setdefault(holder.path, holder)
    return list(found.values())


def keeps_graph(births: Births) -> bool:
    """Whether a tensor that Python can see has nodes of the graph of the step: also where their tensors are gone."""
    return any(_reaches(tensor, births.nodes) for tensor in live_tensors())


def _targets(births: Births) -> tuple[list[Tensor], set[int]]:
    """Return the tensors that keep most, and the ``id`` of those that keep the graph of the step."""
    alive = births.alive()
    sizes: dict[int, int] = {}
    with_graph: set[int] = set()
    tensors = live_tensors()
    for tensor in tensors:
        try:
            size = sum(alive.get(storage_key(storage), (0,))[0] for storage in storages_of([tensor]))
        except (AttributeError, RuntimeError, NotImplementedError):  # half made, or of a transform
            continue
        if _reaches(tensor, births.nodes):
            with_graph.add(id(tensor))
        if size or id(tensor) in with_graph:
            sizes[id(tensor)] = size
    least = max(sizes.values(), default=0) // _LEAST_PART
    found = [tensor for tensor in tensors if sizes.get(id(tensor), -1) >= least or id(tensor) in with_graph]
    found.sort(key=lambda tensor: (id(tensor) not in with_graph, -sizes[id(tensor)]))
    return found[:_MAX_TARGETS], with_graph


def _reaches(tensor: Tensor, nodes: range) -> bool:
    """Whether the graph of ``tensor`` has one of ``nodes``: numbers fall along the way from a result."""
    stack = ends_of_graph(tensor)
    seen: set[Any] = set()
    while stack and len(seen) < _MAX_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = number_of(node)
        if number in nodes:
            return True
        if number >= nodes.stop:
            stack += [earlier for earlier, _ in node.next_functions]
    return False


def _describe(chain: Link, names: Mapping[int, str], *, has_graph: bool) -> Holder:
    things, link = [chain.thing], chain.below
    while link is not None:
        things.append(link.thing)
        link = link.below
    container = max(filter(_is_container, _inner(things[:-1])), key=len, default=None)
    items: list[Any] = list(container.values() if isinstance(container, Mapping) else container or ())
    graphs = [item for item in items if any(ends_of_graph(tensor) for tensor in _tensors(item))]
    return Holder(
        path=describe_chain(chain, names, until=container),
        container="" if container is None else type(container).__name__,
        num_items=len(items),
        num_graphs=len(graphs),
        has_graph=has_graph,
        is_metric=any(map(_is_metric, things)),
        is_bounded=any(is_a(thing, deque) and thing.maxlen is not None for thing in things),
    )


def _inner(things: list[Any]) -> Iterator[Any]:
    """Yield what lies between the name and the tensor, but for tables of attributes and cells of closures."""
    for place, thing in enumerate(things):
        owners = things[max(0, place - 2) : place]
        is_of_function = is_a(thing, tuple) and any(map(callable, owners[-1:]))
        if not is_of_function and not is_table_of_attributes(thing, owners):
            yield thing


def _is_container(thing: Any) -> bool:
    return is_a(thing, dict | list | tuple | set | deque) and len(thing) > 1


def _is_metric(thing: object) -> bool:
    return any(kind.__module__ == "torchmetrics.metric" and kind.__name__ == "Metric" for kind in type(thing).__mro__)


def _tensors(item: Any) -> Iterator[Tensor]:
    if is_a(item, Tensor):
        yield item
    else:
        yield from (part for part in gc.get_referents(item) if is_a(part, Tensor))
