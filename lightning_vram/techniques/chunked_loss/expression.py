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
    """Logits of a linear layer, which are not there.

    Args:
        hidden: What the layer got, [..., D].
        weight: [V, D].
        bias: [V], or none.
        dtype: In which autocast has the layer compute; ``None`` outside of autocast.
        hooks: What is called when a backward comes to the logits, with any tensor.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype | None
    hooks: dict[int, Callable[[Tensor], Any]] = field(default_factory=OrderedDict)

    @property
    def result_dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.hidden.dtype if self.dtype is None else self.dtype

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
    """A function of others.

    Args:
        function: Gets what the arguments are for some rows, flat: [n, V] or [n, K]. Returns a tensor or several,
            [n, ...].
        args: Nodes, or what is no tensor.
        kwargs: The same.
        autocast: Whether the call was made under autocast, and to which dtype.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    autocast: tuple[bool, torch.dtype] | None = None

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
    made: dict[int, Node] = {}

    def get(value: Any) -> Any:
        return made[id(value)] if isinstance(value, KINDS) else value

    for node in walk(root):
        if isinstance(node, Head):
            made[id(node)] = replace(node, hidden=change(node.hidden))
        elif isinstance(node, Rows):
            made[id(node)] = Rows(change(node.values))
        elif isinstance(node, Call):
            args, kwargs = [get(value) for value in node.args], {name: get(v) for name, v in node.kwargs.items()}
            made[id(node)] = replace(node, args=args, kwargs=kwargs)
        else:
            made[id(node)] = node
    return made[id(root)]


def detach(root: Node) -> Node:
    """Return the graph, of which no gradient comes."""
    return _map_tensors(root, lambda tensor: tensor.detach(), keeps_hooks=False)


def hollow(root: Call) -> Call:
    """Return the graph without its tensors, which autograd keeps, and frees when its backward has been."""
    found = _map_tensors(root, lambda tensor: tensor.new_empty(0), keeps_hooks=True)
    assert isinstance(found, Call)
    return found


def _map_tensors(root: Node, change: Callable[[Tensor], Tensor], *, keeps_hooks: bool) -> Node:
    made: dict[int, Node] = {}
    for node in walk(root):
        if isinstance(node, Head):
            hooks = node.hooks if keeps_hooks else OrderedDict()
            bias = None if node.bias is None else change(node.bias)
            made[id(node)] = Head(change(node.hidden), change(node.weight), bias, node.dtype, hooks)
        elif isinstance(node, Rows | Whole):
            made[id(node)] = replace(node, values=change(node.values))
        else:
            args = [made.get(id(value), value) for value in node.args]
            made[id(node)] = replace(node, args=args, kwargs={k: made.get(id(v), v) for k, v in node.kwargs.items()})
    return made[id(root)]
