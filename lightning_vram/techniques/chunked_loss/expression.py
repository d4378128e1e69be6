"""What is computed from logits, row by row, before any row is there: a graph of calls over heads and other inputs.

A row is a token: its hidden state, its logits, its target. Everything in such a graph treats rows alone, so that it can
be computed for some rows at a time.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class Head:
    """Logits of a linear layer, which are not there."""

    hidden: Tensor  # what the layer got, [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V], or none
    dtype: torch.dtype | None  # in which autocast has the layer compute; ``None`` outside of autocast
    # what is called when a backward comes to the logits, with any tensor
    hooks: dict[int, Callable[[Tensor], Any]] = field(default_factory=OrderedDict)

    def compute(self, hidden: Tensor) -> Tensor:
        """Return the logits of some rows, as the layer would: autograd sees it."""
        with torch.autocast(hidden.device.type, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return F.linear(hidden, self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Rows:
    """A tensor with a value, or some, for each row: [..., K]."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor that is the same for all rows: a temperature, weights of classes [V]."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """A function of others."""

    # gets what the arguments are for some rows, flat: [n, V] or [n, K]. Returns a tensor or several, [n, ...].
    function: Callable[..., Any]
    args: Sequence[Any]  # nodes, or what is no tensor
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # the same
    autocast: tuple[bool, torch.dtype] | None = None  # whether the call was made under autocast, and to which dtype

    def context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return that of the call."""
        if self.autocast is None:
            return nullcontext()
        is_enabled, dtype = self.autocast
        return torch.autocast(device_type, dtype=dtype, enabled=is_enabled, cache_enabled=False)


Node = Head | Rows | Whole | Call
KINDS = (Head, Rows, Whole, Call)


def read_autocast(device_type: str) -> tuple[bool, torch.dtype] | None:
    """Return whether there is autocast now, and to which dtype; ``None`` where none is known of."""
    if not torch.amp.is_autocast_available(device_type):
        return None
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)


def walk(root: Node) -> Iterator[Node]:
    """Yield the nodes of a graph, each once, those that it needs before it."""
    seen: set[int] = set()

    def visit(node: Any) -> Iterator[Node]:
        if not isinstance(node, KINDS) or id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, Call):
            for part in (*node.args, *node.kwargs.values()):
                yield from visit(part)
        yield node

    yield from visit(root)


def map_rows(root: Node, change: Callable[[Tensor], Tensor]) -> Node:
    """Return the graph for other rows: ``change`` cuts or reshapes all but the last dimension of what has rows."""

    def change_leaf(node: Head | Rows | Whole) -> Node:
        if isinstance(node, Head):
            return replace(node, hidden=change(node.hidden))
        return Rows(change(node.values)) if isinstance(node, Rows) else node

    return _map_leaves(root, change_leaf)


def detach(root: Node) -> Node:
    """Return the graph, of which no gradient comes."""
    return _map_tensors(root, lambda tensor: tensor.detach(), keeps_hooks=False)


def hollow(root: Call) -> Call:
    """Return the graph without its tensors, which autograd keeps, and frees when its backward has been."""
    found = _map_tensors(root, lambda tensor: tensor.new_empty(0), keeps_hooks=True)
    assert isinstance(found, Call)
    return found


def _map_tensors(root: Node, change: Callable[[Tensor], Tensor], *, keeps_hooks: bool) -> Node:
    def change_leaf(node: Head | Rows | Whole) -> Node:
        if not isinstance(node, Head):
            return replace(node, values=change(node.values))
        hooks = node.hooks if keeps_hooks else OrderedDict()
        bias = None if node.bias is None else change(node.bias)
        return Head(change(node.hidden), change(node.weight), bias, node.dtype, hooks)

    return _map_leaves(root, change_leaf)


def _map_leaves(root: Node, change: Callable[[Head | Rows | Whole], Node]) -> Node:
    made: dict[int, Node] = {}
    for node in walk(root):
        if isinstance(node, Call):
            args = [made.get(id(value), value) for value in node.args]
            made[id(node)] = replace(node, args=args, kwargs={k: made.get(id(v), v) for k, v in node.kwargs.items()})
        else:
            made[id(node)] = change(node)
    return made[id(root)]
