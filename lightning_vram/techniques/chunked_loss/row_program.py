"""A graph of calls over heads and other inputs, computed for some rows at a time: no chunk's logits outlive it.

A row is a token: its hidden state, its logits, its target. Everything in such a graph treats rows alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lightning_vram.core.hooks import unseen_saves


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


_LOW = (torch.float16, torch.bfloat16)


class GradientSum:
    """The gradient of one input; what is added up, is so in float32 where the input is in 16 bit."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def put(self, part: Tensor, start: int) -> None:
        """Take the gradient of some rows."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._like)
        self._sum[start : start + len(part)] = part

    def add(self, part: Tensor) -> None:
        """Add what some rows have of it."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=upcast_dtype(self._like.dtype))
        self._sum += part

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add a product of matrices."""
        if self._sum is None:
            self._sum = (left @ right).to(upcast_dtype(self._like.dtype))
        elif self._sum.dtype == left.dtype:
            self._sum.addmm_(left, right)
        else:
            self._sum += left @ right

    def result(self, shape: Sequence[int]) -> Tensor:
        """Return all of it."""
        whole = torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)
        return whole.view(shape)


def upcast_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what numbers of a dtype are added up in."""
    return torch.float32 if dtype in _LOW else dtype


Inputs = Sequence[Tensor | None]
"""Hidden states, weight and bias of each head, then what has rows, then what has none."""


@dataclass(frozen=True)
class _Chunk:
    """Inputs of some rows."""

    start: int
    hiddens: list[Tensor]
    weights: list[Tensor]
    logits: list[Tensor]
    others: list[Tensor]


class RowProgram:
    """Computes the last call of a graph, whose results have a row for each token."""

    def __init__(self, root: Call, chunk_rows: int) -> None:
        self._nodes = list(walk(root))
        self._root = root
        self._chunk_rows = chunk_rows
        self.heads = [node for node in self._nodes if isinstance(node, Head)]
        rows = [node for node in self._nodes if isinstance(node, Rows)]
        self._others: list[Rows | Whole] = [*rows, *(node for node in self._nodes if isinstance(node, Whole))]
        self._num_rowed = len(rows)

    def inputs(self) -> list[Tensor | None]:
        """Return what it computes with, see :data:`Inputs`."""
        heads = [one for head in self.heads for one in (head.hidden, head.weight, head.bias)]
        return [*heads, *(node.values for node in self._others)]

    def announce_backward(self) -> None:
        """Call the hooks of the logits, or refuse gradients of gradients."""
        if torch.is_grad_enabled():
            raise RuntimeError("ChunkedLoss does not support gradients of gradients (create_graph=True). Leave it out.")
        for head in self.heads:
            for hook in list(head.hooks.values()):
                hook(head.hidden.detach())

    def compute_whole(self) -> Tensor:
        """Return the result of all rows at once: autograd sees each operator."""
        logits = [head.compute(_flat(head.hidden)) for head in self.heads]
        others = [_flat(node.values) if isinstance(node, Rows) else node.values for node in self._others]
        (whole,) = self._evaluate(logits, others)
        return whole

    def run(self, inputs: Inputs) -> list[Tensor]:
        """Return all rows of the results."""
        found: list[Tensor] = []
        flat = self._flatten(inputs)
        for chunk in self._chunks(flat):
            results = self._evaluate(chunk.logits, chunk.others)
            if not found:
                found = [result.new_empty((_length(flat), *result.shape[1:])) for result in results]
            for whole, result in zip(found, results, strict=True):
                whole[chunk.start : chunk.start + len(result)] = result
        return found

    def run_backward(
        self, inputs: Inputs, gradients: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs, ``None`` for those that are not wanted."""
        sums = _GradientSums(self._flatten(inputs), wanted, len(self.heads), self._num_rowed)
        with unseen_saves():
            for chunk in self._chunks(sums.inputs, wanted):
                with torch.enable_grad():
                    results = self._evaluate(chunk.logits, chunk.others)
                stop = chunk.start + len(results[0])
                sums.take(chunk, results, [one if one is None else one[chunk.start : stop] for one in gradients])
        return sums.results(inputs)

    def run_sum(self, inputs: Inputs, wanted: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum of the rows of the only result, and its gradients, of which inputs they are wanted."""
        total, sums = None, _GradientSums(self._flatten(inputs), wanted, len(self.heads), self._num_rowed)
        with unseen_saves():
            for chunk in self._chunks(sums.inputs, wanted):
                with torch.enable_grad():
                    (rows,) = self._evaluate(chunk.logits, chunk.others)
                part = rows.detach().sum()
                total = part if total is None else total + part
                sums.take(chunk, [rows], [torch.ones_like(rows)])
                del rows
        assert total is not None
        return total, sums.results(inputs)

    def _flatten(self, inputs: Inputs) -> list[Tensor | None]:
        """Return inputs whose rows are flat, [N, D], and weights as the heads compute with them."""
        found, first = list(inputs), 3 * len(self.heads)
        for place in (*range(0, first, 3), *range(first, first + self._num_rowed)):
            one = found[place]
            assert one is not None
            found[place] = _flat(one)
        return found

    def _chunks(self, inputs: Inputs, wanted: Sequence[bool] = ()) -> Iterator[_Chunk]:
        """Yield the inputs of some rows after others, at least once; a graph begins at those that are wanted."""
        first = 3 * len(self.heads)
        tensors: list[Any] = list(inputs)
        cast = [_cast(head, *tensors[3 * place + 1 : 3 * place + 3]) for place, head in enumerate(self.heads)]
        for start in range(0, max(_length(inputs), 1), self._chunk_rows):
            rows = slice(start, start + self._chunk_rows)
            hiddens = [tensors[3 * i][rows].detach().to(weight.dtype) for i, (weight, _) in enumerate(cast)]
            logits = [F.linear(hidden, *pair) for hidden, pair in zip(hiddens, cast, strict=True)]
            others = [one[rows] if place < self._num_rowed else one for place, one in enumerate(tensors[first:])]
            others = [one.detach() for one in others]
            if wanted:
                for place, one in enumerate(logits):
                    one.requires_grad_(any(wanted[3 * place : 3 * place + 3]))
                for one, is_wanted in zip(others, wanted[first:], strict=True):
                    one.requires_grad_(is_wanted)
            yield _Chunk(start, hiddens, [weight for weight, _ in cast], logits, others)

    def _evaluate(self, logits: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        leaves = zip((*self.heads, *self._others), (*logits, *others), strict=True)
        values: dict[int, Any] = {id(leaf): value for leaf, value in leaves}

        def get(value: Any) -> Any:
            return values[id(value)] if isinstance(value, Node) else value

        for node in self._nodes:
            if isinstance(node, Call):
                with node.context(logits[0].device.type):
                    kwargs = {name: get(value) for name, value in node.kwargs.items()}
                    values[id(node)] = node.function(*(get(value) for value in node.args), **kwargs)
        result = values[id(self._root)]
        return [result] if isinstance(result, Tensor) else list(result)


class _GradientSums:
    """The gradients of all inputs."""

    def __init__(self, inputs: Inputs, wanted: Sequence[bool], num_heads: int, num_rowed: int) -> None:
        self.inputs = inputs
        self._num_heads, self._num_rowed = num_heads, num_rowed
        pairs = zip(inputs, wanted, strict=True)
        self._sums = [GradientSum(one) if is_wanted and one is not None else None for one, is_wanted in pairs]

    def take(self, chunk: _Chunk, results: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Take what a chunk has of them."""
        found = _differentiate(results, gradients, [*chunk.logits, *chunk.others])
        for place, of_logits in enumerate(found[: self._num_heads]):
            if of_logits is not None:
                self._take_head(place, of_logits, chunk)
        for place, gradient in enumerate(found[self._num_heads :]):
            one = self._sums[3 * self._num_heads + place]
            if one is not None and gradient is not None:
                one.put(gradient, chunk.start) if place < self._num_rowed else one.add(gradient)

    def _take_head(self, place: int, of_logits: Tensor, chunk: _Chunk) -> None:
        of_hidden, of_weight, of_bias = self._sums[3 * place : 3 * place + 3]
        if of_hidden is not None:
            of_hidden.put(of_logits @ chunk.weights[place], chunk.start)
        if of_weight is not None:
            of_weight.add_product(of_logits.t(), chunk.hiddens[place])
        if of_bias is not None:
            of_bias.add(of_logits.sum(0, dtype=upcast_dtype(of_logits.dtype)))

    def results(self, inputs: Inputs) -> list[Tensor | None]:
        """Return them in the shapes of the inputs."""
        pairs = zip(self._sums, inputs, strict=True)
        return [one.result(whole.shape) if one is not None and whole is not None else None for one, whole in pairs]


def _differentiate(
    results: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    ends = [(r, g) for r, g in zip(results, gradients, strict=True) if g is not None and r.requires_grad]
    chosen = [leaf for leaf in leaves if leaf.requires_grad]
    if not ends or not chosen:
        return [None] * len(leaves)
    outputs, with_respect = zip(*ends, strict=True)
    found = iter(torch.autograd.grad(outputs, chosen, with_respect, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _cast(head: Head, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias as a head computes with them; once for all rows."""
    dtype = head.dtype or weight.dtype
    return weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)


def _flat(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def _length(inputs: Inputs) -> int:
    assert inputs[0] is not None
    return len(inputs[0])


class _Rows(Function):
    """Rows of the results of a program."""

    @staticmethod
    def forward(ctx: Any, program: RowProgram, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """Compute them."""
        ctx.program = program
        ctx.save_for_backward(*inputs)
        results = program.run(inputs)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute them again, and their gradients."""
        ctx.program.announce_backward()
        return (None, *ctx.program.run_backward(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:]))


class _Sum(Function):
    """The sum of the rows of the only result of a program.

    Its gradients are computed with it, and scaled in the backward: three products of hidden states and weights, as in
    the baseline. Those of single rows (``_Rows``) are computed in the backward, from recomputed logits: four products.
    """

    @staticmethod
    def forward(ctx: Any, program: RowProgram, *inputs: Tensor | None) -> Tensor:
        """Compute it, and its gradients."""
        ctx.program = program
        ctx.save_for_backward(*inputs)
        if not any(ctx.needs_input_grad):
            return program.run(inputs)[0].sum()
        # Not saved: hooks would move to the host what is needed next.
        total, ctx.made = program.run_sum(inputs, ctx.needs_input_grad[1:])
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return what there is, or compute it again where the graph was retained for a second backward."""
        ctx.program.announce_backward()
        made, ctx.made = ctx.made, None
        if made is None:
            _, made = ctx.program.run_sum(ctx.saved_tensors, ctx.needs_input_grad[1:])
        return (None, *(None if one is None else one.mul_(gradient) for one in made))


def compute_rows(root: Call, chunk_rows: int) -> list[Tensor]:
    """Return the results of the last call of a graph, all rows of each: [N, ...]."""
    inputs = RowProgram(root, chunk_rows).inputs()
    found: Any = _Rows.apply(RowProgram(hollow(root), chunk_rows), *inputs)  # type: ignore[no-untyped-call]
    return list(found)


def compute_sum(root: Call, chunk_rows: int) -> Tensor:
    """Return the sum of the rows of the last call of a graph, which has one number in each."""
    inputs = RowProgram(root, chunk_rows).inputs()
    total: Tensor = _Sum.apply(RowProgram(hollow(root), chunk_rows), *inputs)  # type: ignore[no-untyped-call]
    return total
