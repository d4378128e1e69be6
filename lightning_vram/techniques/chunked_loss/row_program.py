"""A graph of calls, computed for some rows at a time: no chunk's logits outlive it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_vram.core.hooks.unseen_saves import unseen_saves
from lightning_vram.techniques.chunked_loss.expression import Call, Head, Node, Rows, Whole, walk
from lightning_vram.techniques.chunked_loss.gradient_sums import GradientSum, wide_dtype

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
        sums = _Sums(self._flatten(inputs), wanted, len(self.heads), self._num_rowed)
        with unseen_saves():
            for chunk in self._chunks(sums.inputs, wanted):
                with torch.enable_grad():
                    results = self._evaluate(chunk.logits, chunk.others)
                stop = chunk.start + len(results[0])
                sums.take(chunk, results, [one if one is None else one[chunk.start : stop] for one in gradients])
        return sums.results(inputs)

    def run_sum(self, inputs: Inputs, wanted: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Return the sum of the rows of the only result, and its gradients, of which inputs they are wanted."""
        total, sums = None, _Sums(self._flatten(inputs), wanted, len(self.heads), self._num_rowed)
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
        values: dict[int, Any] = {}
        for leaf, value in zip((*self.heads, *self._others), (*logits, *others), strict=True):
            values[id(leaf)] = value

        def get(value: Any) -> Any:
            return values[id(value)] if isinstance(value, Node) else value

        for node in self._nodes:
            if isinstance(node, Call):
                with node.context(logits[0].device.type):
                    kwargs = {name: get(value) for name, value in node.kwargs.items()}
                    values[id(node)] = node.function(*(get(value) for value in node.args), **kwargs)
        result = values[id(self._root)]
        return [result] if isinstance(result, Tensor) else list(result)


class _Sums:
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
            of_bias.add(of_logits.sum(0, dtype=wide_dtype(of_logits.dtype)))

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
