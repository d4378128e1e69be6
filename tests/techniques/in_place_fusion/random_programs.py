"""Random programs of cheap and costly operators, views and writes."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

SIDE = 6


Unary = Callable[[Tensor], Tensor]


NEW: list[Unary] = [
    F.silu,
    F.relu,
    F.gelu,
    torch.tanh,
    torch.sigmoid,
    lambda x: x * 2 + 1,
    lambda x: x.clamp(-0.5, 0.5),
    lambda x: F.layer_norm(x, (SIDE,)),
    lambda x: F.batch_norm(x, None, None, training=True),
    lambda x: F.dropout(x, 0.3),
    lambda x: x.masked_fill(x > 0.4, 0.1),
    lambda x: x.to(torch.float64).exp().to(torch.float32).clamp(max=3),
    lambda x: F.pad(x, (1, 0))[:, :SIDE],
    lambda x: x.softmax(-1),
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: x.index_select(0, torch.tensor([3, 1, 0, 2, 5, 4])),
    lambda x: F.max_pool1d(x, 3, 1, 1),
    lambda x: x.cumsum(0) / SIDE,
    lambda x: x.flip(0).contiguous(),
]


VIEWS: list[Unary] = [
    lambda x: x.t(),
    lambda x: x.view(-1).view(SIDE, SIDE) if x.is_contiguous() else x.reshape(SIDE, SIDE),
    lambda x: x[:],
    lambda x: x.detach(),
    lambda x: x.unsqueeze(0).expand(2, -1, -1)[0],
    lambda x: torch.stack(x.unbind(0)),
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
]


BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: torch.cat([a, b])[1 : SIDE + 1],
    lambda a, b: a @ b / SIDE,
    lambda a, b: torch.lerp(a, b, 0.3),
]


WRITES: list[Callable[[Tensor, Tensor], object]] = [
    lambda a, b: a.add_(b.detach(), alpha=0.5),
    lambda a, b: a.mul_(0.5),
    lambda a, b: F.relu_(a),
    lambda a, b: F.leaky_relu_(a, 0.1),
    lambda a, b: a.clamp_(-1, 1),
    lambda a, b: a[1:3].zero_(),
    lambda a, b: a.t().mul_(1.5),
    lambda a, b: a.copy_(b),
    lambda a, b: a.detach().add_(0.25),
    lambda a, b: a.sigmoid_(),
    lambda a, b: F.dropout(a, 0.2, inplace=True),
]


COSTLY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, w: x @ w,
    lambda x, w: F.linear(x, w),
    lambda x, w: F.conv1d(x[None], w[:, :, None])[0],
]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(0, len(NEW) - 1), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("view"), st.integers(0, len(VIEWS) - 1), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("binary"), st.integers(0, len(BINARY) - 1), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("write"), st.integers(0, len(WRITES) - 1), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("costly"), st.integers(0, len(COSTLY) - 1), st.integers(0, 9), st.integers(0, 1)),
    ),
    min_size=3,
    max_size=14,
)


def run(program: list[tuple[str, int, int, int]], context: AbstractContextManager[object], seed: int) -> object:
    """Run ``program`` on a list of tensors that grows; return the loss and gradients, or how it was refused."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(SIDE, SIDE, generator=generator).requires_grad_() for _ in range(2)]
    tensors = [torch.randn(SIDE, SIDE, generator=generator), weights[0] * 1.5]
    torch.manual_seed(seed)
    with context:
        for kind, which, first, second in program:
            a, b = tensors[-1 - first % len(tensors)], tensors[-1 - second % len(tensors)]
            try:
                if kind == "new":
                    tensors.append(NEW[which](a))
                elif kind == "view":
                    tensors.append(VIEWS[which](a))
                elif kind == "binary":
                    tensors.append(BINARY[which](a, b))
                elif kind == "costly":
                    tensors.append(COSTLY[which](a, weights[second]))
                else:
                    WRITES[which](a, b)
            except RuntimeError:  # a view that may not be written to: the same in both runs
                tensors.append(a * 1)
        del a, b
        loss = sum((tensor.float() * (index + 1)).square().mean() for index, tensor in enumerate(tensors[-3:]))
        loss = loss + (tensors[-1] @ weights[1]).square().mean()
    tensors.clear()
    return outcome(loss, weights)


def outcome(loss: Tensor, weights: list[Tensor]) -> object:
    """Return the loss, gradients and the state of the random numbers, or how the backward was refused."""
    try:
        loss.backward()
    except RuntimeError as error:
        return "refused" if "modified by an inplace operation" in str(error) else str(error)
    return [loss.detach(), *(weight.grad for weight in weights), torch.get_rng_state()]
