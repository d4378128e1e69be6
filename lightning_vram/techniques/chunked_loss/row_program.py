"""A graph of calls over heads and other tensors, computed for some rows at a time: no chunk's logits outlive it.

A row is a token: its hidden state, its logits, its target. Everything in such a graph treats rows alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lightning_vram.core.hooks import unseen_saves


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor: with a row for each token, [..., K], or the same for all tokens: a temperature, class weights [V]."""

    values: Tensor
    has_rows: bool


@dataclass(frozen=True, eq=False)
class Call:
    """A function of leaves and other calls."""

    # gets what the arguments are for some rows, flat: [n, V] or [n, K]. Returns a tensor or several, [n, ...].
    function: Callable[..., Any]
    args: Sequence[Any]  # nodes, or what is no tensor
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # the same
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which the call was made
    hooks: list[Callable[[Tensor], Any]] = field(default_factory=list)  # of a head: called when a backward reaches it


Node = Leaf | Call


def read_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what enters the autocast of now again."""
    if not torch.amp.is_autocast_available(device_type):
        return nullcontext
    dtype, is_enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    return partial(torch.autocast, device_type, dtype=dtype, enabled=is_enabled, cache_enabled=False)


def make_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> Call:
    """Return the logits of a linear layer; ``dtype``: of autocast, ``None`` outside of it."""
    parts = [Leaf(hidden, has_rows=True), Leaf(weight, has_rows=False)]
    parts += [] if bias is None else [Leaf(bias, has_rows=False)]
    return Call(_linear, parts, {"dtype": dtype or weight.dtype}, read_autocast(hidden.device.type))


def _linear(*parts: Tensor, dtype: torch.dtype) -> Tensor:
    return F.linear(*(one.to(dtype) for one in parts))


def heads_of(root: Node) -> list[Call]:
    """Return the heads in a graph."""
    return [node for node in walk(root) if isinstance(node, Call) and node.function is _linear]


def walk(root: Any, seen: set[int] | None = None) -> Iterator[Node]:
    """Yield the nodes of a graph, each once, those that it needs before it."""
    seen = set() if seen is None else seen
    if isinstance(root, Node) and id(root) not in seen:
        seen.add(id(root))
        if isinstance(root, Call):
            for part in (*root.args, *root.kwargs.values()):
                yield from walk(part, seen)
        yield root


def _map_leaves(root: Call, change: Callable[[Leaf], Tensor]) -> Call:
    made: dict[int, Any] = {}
    for node in walk(root):
        if isinstance(node, Call):
            args = [made.get(id(value), value) for value in node.args]
            made[id(node)] = replace(node, args=args, kwargs={k: made.get(id(v), v) for k, v in node.kwargs.items()})
        else:
            made[id(node)] = replace(node, values=change(node))
    result: Call = made[id(root)]
    return result


def map_rows(root: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """Return the graph for other rows: ``change`` cuts or reshapes all but the last dimension of what has rows."""
    return _map_leaves(root, lambda leaf: change(leaf.values) if leaf.has_rows else leaf.values)


def detach(root: Call) -> Call:
    """Return the graph, of which no gradient comes."""
    return _map_leaves(root, lambda leaf: leaf.values.detach())


def _zeros_for(leaf: Leaf, like: Tensor) -> Tensor:
    """Return the gradient of a leaf to begin with; that of all tokens is in float32 where the leaf is in 16 bit."""
    is_low = like.dtype in (torch.float16, torch.bfloat16) and not leaf.has_rows
    return torch.zeros_like(like, dtype=torch.float32 if is_low else like.dtype)


class RowProgram:
    """Computes the last call of a graph, whose results have a row for each token.

    It holds no tensor of the graph: autograd keeps them, and frees them after its backward.
    """

    def __init__(self, root: Call, chunk_rows: int | None = None, class_dim: int | None = None) -> None:
        self._root = _map_leaves(root, lambda leaf: leaf.values.new_empty(0))
        self._chunk_rows = chunk_rows  # None: all rows at once
        self._class_dim = class_dim  # of gradients; None: they have a row for each token, [N, ...]
        self._nodes = list(walk(self._root))
        self._leaves = [node for node in self._nodes if isinstance(node, Leaf)]
        self._heads = heads_of(self._root)
        parts = {id(part) for head in self._heads for part in head.args}
        self._others = [leaf for leaf in self._leaves if id(leaf) not in parts]

    def announce_backward(self) -> None:
        """Call the hooks of the logits, or refuse gradients of gradients."""
        if torch.is_grad_enabled():
            raise RuntimeError("ChunkedLoss does not support gradients of gradients (create_graph=True). Leave it out.")
        for head in self._heads:
            for hook in head.hooks:
                hook(self._leaves[0].values)  # any tensor

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return all rows of the results."""
        results = [self._evaluate(values) for _, values in self._chunks(self._flatten(inputs))]
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*results, strict=True)]

    def differentiate(
        self, inputs: Sequence[Tensor], wanted: Sequence[bool], gradients: Sequence[Tensor | None] | None = None
    ) -> tuple[Any, list[Tensor | None]]:
        """Return the sum of the only result, and its gradients, ``None`` for inputs whose gradients are not wanted.

        With ``gradients`` of the results: the gradients for these, and no sum.
        """
        total: Any = 0
        tensors, pairs = self._flatten(inputs), list(zip(self._leaves, inputs, wanted, strict=True))
        if gradients is not None and self._class_dim is not None:
            gradients = [None if one is None else one.movedim(self._class_dim, -1).flatten(0, -2) for one in gradients]
        sums = {id(leaf): _zeros_for(leaf, tensors[id(leaf)]) for leaf, _, is_wanted in pairs if is_wanted}
        with unseen_saves():
            for rows, values in self._chunks(tensors, sums):
                with torch.enable_grad():
                    results = self._evaluate(values)
                if gradients is None:
                    total = total + results[0].detach().sum()
                    self._take(sums, values, rows, [(results[0], torch.ones_like(results[0]))])
                else:
                    of_chunk = [None if one is None else one[rows] for one in gradients]
                    self._take(sums, values, rows, zip(results, of_chunk, strict=True))
                del results
        found = [sums[id(leaf)].to(one.dtype).view(one.shape) if is_wanted else None for leaf, one, is_wanted in pairs]
        return total, found

    def _flatten(self, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the values of the leaves, those that have rows as [N, K]."""
        pairs = zip(self._leaves, inputs, strict=True)
        return {id(leaf): (one.reshape(-1, one.shape[-1]) if leaf.has_rows else one).detach() for leaf, one in pairs}

    def _chunks(
        self, tensors: Mapping[int, Tensor], sums: Mapping[int, Tensor] | None = None
    ) -> Iterator[tuple[slice, dict[int, Tensor]]]:
        """Yield some rows after others, at least once, with the values of leaves and heads.

        With ``sums``, a graph begins at logits and leaves whose gradients they want.
        """
        sums, cast = sums or {}, dict(tensors)
        for head in self._heads:  # once for all rows
            cast |= {id(part): tensors[id(part)].to(head.kwargs["dtype"]) for part in head.args[1:]}
        length = max(len(tensors[id(self._heads[0].args[0])]), 1)
        step = self._chunk_rows or length
        for rows in (slice(start, start + step) for start in range(0, length, step)):
            values = {id(leaf): cast[id(leaf)][rows] if leaf.has_rows else cast[id(leaf)] for leaf in self._leaves}
            for head in self._heads:
                hidden, weight = (values[id(part)] for part in head.args[:2])
                hidden = values[id(head.args[0])] = hidden.to(weight.dtype)
                if head is self._root and sums:  # only the shape is needed for a gradient
                    values[id(head)] = hidden.new_empty(()).expand(len(hidden), len(weight))
                else:
                    with head.autocast():
                        values[id(head)] = F.linear(*(values[id(part)] for part in head.args))
                values[id(head)].requires_grad_(any(id(part) in sums for part in head.args))
            for leaf in self._others:
                values[id(leaf)] = values[id(leaf)].detach().requires_grad_(id(leaf) in sums)
            yield rows, values
            values.clear()

    def _evaluate(self, known: Mapping[int, Tensor]) -> list[Tensor]:
        values: dict[int, Any] = dict(known)
        for node in self._nodes:
            if isinstance(node, Call) and id(node) not in values:
                with node.autocast():
                    kwargs = {name: values.get(id(part), part) for name, part in node.kwargs.items()}
                    values[id(node)] = node.function(*(values.get(id(part), part) for part in node.args), **kwargs)
        result = values[id(self._root)]
        return [result] if isinstance(result, Tensor) else list(result)

    def _take(
        self, sums: Mapping[int, Tensor], values: Mapping[int, Tensor], rows: slice, pairs: Iterable[Any]
    ) -> None:
        """Add the gradients that results with these gradients mean for a chunk."""
        ends = [(result, one) for result, one in pairs if one is not None and result.requires_grad]
        nodes: list[Node] = [*self._heads, *self._others]
        nodes = [node for node in nodes if values[id(node)].requires_grad]
        if not ends or not nodes:
            return
        results, gradients = zip(*ends, strict=True)
        found: Any = torch.autograd.grad(results, [values[id(node)] for node in nodes], gradients, allow_unused=True)
        for node, gradient in zip(nodes, found, strict=True):
            if gradient is None:
                continue
            if isinstance(node, Leaf):
                sums[id(node)][rows if node.has_rows else ...].add_(gradient)
            else:
                _take_head(sums, values, rows, node, gradient)


def _take_head(
    sums: Mapping[int, Tensor], values: Mapping[int, Tensor], rows: slice, head: Call, gradient: Tensor
) -> None:
    hidden, weight, bias = (id(part) for part in (*head.args, None)[:3])
    if hidden in sums:
        sums[hidden][rows].add_(gradient @ values[weight])
    if weight in sums and sums[weight].dtype == gradient.dtype:
        sums[weight].addmm_(gradient.t(), values[hidden])
    elif weight in sums:
        sums[weight].add_(gradient.t() @ values[hidden])
    if bias in sums:
        sums[bias].add_(gradient.sum(0, dtype=torch.promote_types(gradient.dtype, torch.float32)))


class _Rows(Function):
    """Rows of the results of a program, their sum, or a tensor without values in their place.

    Gradients of a sum are computed with it, and scaled in the backward: three products of hidden states and weights, as
    in the baseline. Those of rows are computed in the backward, from recomputed logits: four products.
    """

    @staticmethod
    def forward(ctx: Any, program: RowProgram, make: Callable[[Sequence[bool]], Any], *inputs: Tensor) -> Any:
        """Make them; ``make`` gets which gradients are wanted, and may return these, too."""
        ctx.program = program
        ctx.save_for_backward(*inputs)
        # Gradients are not saved: hooks would move to the host what is needed next.
        results, ctx.made = make(ctx.needs_input_grad[2:])
        ctx.is_sum = ctx.made is not None
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Return gradients that are there, or compute them: also where a graph was retained for a second backward."""
        ctx.program.announce_backward()
        made, ctx.made = ctx.made, None
        if made is None:  # with the same rounding as before
            of_results = None if ctx.is_sum else gradients
            made = ctx.program.differentiate(ctx.saved_tensors, ctx.needs_input_grad[2:], of_results)[1]
        if ctx.is_sum:
            made = [None if one is None or gradients[0] is None else one.mul_(gradients[0]) for one in made]
        return (None, None, *made)


def inputs_of(root: Call) -> list[Tensor]:
    """Return the tensors that a :class:`RowProgram` of this graph computes with."""
    return [node.values for node in walk(root) if isinstance(node, Leaf)]


def compute_rows(root: Call, chunk_rows: int) -> list[Tensor]:
    """Return the results of the last call of a graph, all rows of each: [N, ...]."""
    program, inputs = RowProgram(root, chunk_rows), inputs_of(root)
    return list(_Rows.apply(program, lambda wanted: (program.run(inputs), None), *inputs))  # type: ignore[no-untyped-call]


def compute_sum(root: Call, chunk_rows: int) -> Any:
    """Return the sum of the rows of the last call of a graph, which has one number in each."""
    program, inputs = RowProgram(root, chunk_rows), inputs_of(root)

    def make(wanted: Sequence[bool]) -> tuple[list[Tensor], Any]:
        if not any(wanted):
            return [program.run(inputs)[0].sum()], None
        total, gradients = program.differentiate(inputs, wanted)
        return [total], gradients

    return _Rows.apply(program, make, *inputs)[0]  # type: ignore[no-untyped-call]


def compute_later(root: Call, class_dim: int, make: Callable[[], Tensor]) -> Any:
    """Return a tensor without values in place of the rows of a graph, which autograd connects with its inputs."""
    program = RowProgram(root, None, class_dim)
    return _Rows.apply(program, lambda wanted: ([make()], None), *inputs_of(root))[0]  # type: ignore[no-untyped-call]
