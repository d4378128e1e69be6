"""Compute what is asked of logits for some rows at a time: no chunk's logits outlive it.

The gradients of a sum, such as a loss, are made with it, and multiplied by what the sum counts for in the backward: three
products of hidden states and weights, as plainly. Those of single rows are made in the backward, from the same logits
computed again: four products. Gradients of weights are added up in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from lightning_vram.techniques.chunked_loss.expression import Call, Head, Node, Rows, Whole, walk

_LOW = (torch.float16, torch.bfloat16)


class RowProgram:
    """A graph of calls, to be computed chunk by chunk.

    Args:
        root: Its last call, whose results have a row for each token.
        chunk_rows: Rows at a time.
    """

    def __init__(self, root: Call, chunk_rows: int) -> None:
        self._nodes = list(walk(root))
        self._root = root
        self._chunk_rows = chunk_rows
        self.heads = [node for node in self._nodes if isinstance(node, Head)]
        self._rows = [node for node in self._nodes if isinstance(node, Rows)]
        self._wholes = [node for node in self._nodes if isinstance(node, Whole)]

    def inputs(self) -> list[Tensor | None]:
        """Return what it computes with: hidden states, weights and biases of heads, then what has rows, then others."""
        heads = [one for head in self.heads for one in (head.hidden, head.weight, head.bias)]
        return [*heads, *(node.values for node in self._rows), *(node.values for node in self._wholes)]

    def announce_backward(self) -> None:
        """Call the hooks of the logits."""
        for head in self.heads:
            for hook in list(head.hooks.values()):
                hook(head.hidden.detach())

    def compute_whole(self) -> Tensor:
        """Return the result of all rows at once: autograd sees each operator."""
        logits = [head.compute(_flat(head.hidden)) for head in self.heads]
        (whole,) = self._evaluate(logits, [_flat(one.values) for one in self._rows], [w.values for w in self._wholes])
        return whole

    def run(self, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return all rows of the results."""
        inputs = self._flatten(inputs)
        cast = self._cast(inputs)
        num_rows = _length(inputs[0])
        found: list[Tensor] = []
        for start in range(0, max(num_rows, 1), self._chunk_rows):
            stop = min(start + self._chunk_rows, num_rows)
            hiddens, sides, wholes = self._cut(inputs, start, stop)
            logits = [F.linear(hidden.to(w.dtype), w, b) for hidden, (w, b) in zip(hiddens, cast, strict=True)]
            results = self._evaluate(logits, sides, wholes)
            if not found:
                found = [result.new_empty((num_rows, *result.shape[1:])) for result in results]
            for whole, result in zip(found, results, strict=True):
                whole[start:stop] = result
        return found

    def run_backward(
        self,
        inputs: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None] | None,
        wanted: Sequence[bool],
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the gradients of the inputs, ``None`` for those that are not wanted, and the sum of all rows.

        Args:
            inputs: See :meth:`inputs`.
            gradients: Of the results. ``None``: of their sum, which is returned as well.
            wanted: Of which inputs.
        """
        total = None
        shapes = [None if one is None else one.shape for one in inputs]
        inputs = self._flatten(inputs)
        cast = self._cast(inputs)
        sums = [_Sum(one) if is_wanted else None for one, is_wanted in zip(inputs, wanted, strict=True)]
        num_rows, num_heads, num_rowed = _length(inputs[0]), len(self.heads), len(self._rows)
        for start in range(0, max(num_rows, 1), self._chunk_rows):
            stop = min(start + self._chunk_rows, num_rows)
            hiddens, sides, wholes = self._cut(inputs, start, stop)
            hiddens = [hidden.to(weight.dtype) for hidden, (weight, _) in zip(hiddens, cast, strict=True)]
            logits = [F.linear(hidden, w, b) for hidden, (w, b) in zip(hiddens, cast, strict=True)]
            for place, one in enumerate(logits):
                one.requires_grad_(any(wanted[3 * place : 3 * place + 3]))
            first = 3 * num_heads
            sides = [s.requires_grad_(w) for s, w in zip(sides, wanted[first : first + num_rowed], strict=True)]
            wholes = [one.detach().requires_grad_(w) for one, w in zip(wholes, wanted[first + num_rowed :], strict=True)]
            with torch.enable_grad():
                results = self._evaluate(logits, sides, wholes)
            if gradients is None:
                (rows,) = results
                some, part = [torch.ones_like(rows)], rows.detach().sum()
                total = part if total is None else total + part
            else:
                some = [g if g is None else g[start:stop] for g in gradients]
            found = _differentiate(results, some, [*logits, *sides, *wholes])
            del results
            for place, gradient in enumerate(found[:num_heads]):
                if gradient is not None:
                    _add_head(sums[3 * place : 3 * place + 3], gradient, hiddens[place], cast[place][0], start)
            for one, gradient in zip(sums[first : first + num_rowed], found[num_heads : num_heads + num_rowed], strict=True):
                if one is not None and gradient is not None:
                    one.put(gradient, start)
            for one, gradient in zip(sums[first + num_rowed :], found[num_heads + num_rowed :], strict=True):
                if one is not None and gradient is not None:
                    one.add(gradient)
        made = [None if one is None else one.result().view(shape) for one, shape in zip(sums, shapes, strict=True)]
        return made, total

    def _flatten(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return hidden states and others with a row for each token: [N, D]."""
        first, last = 3 * len(self.heads), 3 * len(self.heads) + len(self._rows)
        has_rows = {*range(0, first, 3), *range(first, last)}
        return [_flat(one) if place in has_rows and one is not None else one for place, one in enumerate(inputs)]

    def _cast(self, inputs: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor | None]]:
        """Return weights and biases as the heads compute with them; once for all rows."""
        found = []
        for place, head in enumerate(self.heads):
            weight, bias = inputs[3 * place + 1], inputs[3 * place + 2]
            assert weight is not None
            dtype = head.dtype or weight.dtype
            found.append((weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)))
        return found

    def _cut(
        self, inputs: Sequence[Tensor | None], start: int, stop: int
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        first, last = 3 * len(self.heads), 3 * len(self.heads) + len(self._rows)
        tensors: list[Any] = list(inputs)
        hiddens = [tensors[3 * place][start:stop].detach() for place in range(len(self.heads))]
        return hiddens, [one[start:stop].detach() for one in tensors[first:last]], tensors[last:]

    def _evaluate(self, logits: Sequence[Tensor], sides: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Tensor]:
        values: dict[int, Any] = {}
        for nodes, found in ((self.heads, logits), (self._rows, sides), (self._wholes, wholes)):
            values.update((id(node), value) for node, value in zip(nodes, found, strict=True))
        device_type = logits[0].device.type

        def get(value: Any) -> Any:
            return values.get(id(value), value) if isinstance(value, Node) else value

        for node in self._nodes:
            if isinstance(node, Call):
                with node.context(device_type):
                    kwargs = {name: get(value) for name, value in node.kwargs.items()}
                    values[id(node)] = node.function(*(get(value) for value in node.args), **kwargs)
        result = values[id(self._root)]
        return [result] if isinstance(result, Tensor) else list(result)


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


class ChunkedRows(torch.autograd.Function):
    """Rows of results of a program."""

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
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute them again, and their gradients."""
        ctx.program.announce_backward()
        found, _ = ctx.program.run_backward(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:])
        return (None, *found)


class ChunkedSum(torch.autograd.Function):
    """The sum of the rows of the only result of a program."""

    @staticmethod
    def forward(ctx: Any, program: RowProgram, *inputs: Tensor | None) -> Tensor:
        """Compute it, and its gradients."""
        ctx.program = program
        ctx.save_for_backward(*inputs)
        wanted = ctx.needs_input_grad[1:]
        if not any(wanted):
            (rows,) = program.run(inputs)
            return rows.sum()
        # Not saved: hooks would move to the host what is needed next.
        ctx.made, total = program.run_backward(inputs, None, wanted)
        assert total is not None
        return total

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return what there is, or compute it again where the graph was retained for a second backward."""
        ctx.program.announce_backward()
        made, ctx.made = ctx.made, None
        if made is None:
            made, _ = ctx.program.run_backward(ctx.saved_tensors, None, ctx.needs_input_grad[1:])
        return (None, *(None if one is None else one.mul_(gradient) for one in made))


def compute_sum(root: Call, chunk_rows: int) -> Tensor:
    """Return the sum of the rows of the last call of a graph, which has one number in each."""
    program = RowProgram(root, chunk_rows)
    total: Tensor = ChunkedSum.apply(program, *program.inputs())
    return total


def compute_rows(root: Call, chunk_rows: int) -> list[Tensor]:
    """Return the results of the last call of a graph, all rows of each: [N, ...]."""
    program = RowProgram(root, chunk_rows)
    found: Any = ChunkedRows.apply(program, *program.inputs())
    return list(found)


class _Sum:
    """A gradient that is put together from chunks, in float32 where its tensor is in 16 bit."""

    def __init__(self, like: Tensor | None) -> None:
        assert like is not None
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
            self._sum = torch.zeros_like(self._like, dtype=_wide(self._like.dtype))
        self._sum += part

    def add_product(self, left: Tensor, right: Tensor) -> None:
        """Add a product."""
        if self._sum is not None and self._sum.dtype == left.dtype:
            self._sum.addmm_(left, right)
        elif self._sum is None:
            self._sum = (left @ right).to(_wide(self._like.dtype))
        else:
            self._sum += left @ right

    def result(self) -> Tensor:
        """Return all of it."""
        return torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)


def _add_head(sums: Sequence[_Sum | None], gradient: Tensor, hidden: Tensor, weight: Tensor, start: int) -> None:
    """Pass the gradient of some logits on."""
    of_hidden, of_weight, of_bias = sums
    if of_hidden is not None:
        of_hidden.put(gradient @ weight, start)
    if of_weight is not None:
        of_weight.add_product(gradient.t(), hidden)
    if of_bias is not None:
        of_bias.add(gradient.sum(0, dtype=_wide(gradient.dtype)))


def _flat(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1])


def _length(values: Tensor | None) -> int:
    assert values is not None
    return len(values)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _LOW else dtype
