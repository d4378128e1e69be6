"""Results computed chunk by chunk, with gradients."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from lightning_vram.techniques.chunked_loss.expression import Call, hollow
from lightning_vram.techniques.chunked_loss.row_program import RowProgram


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
