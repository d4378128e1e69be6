"""Random programs of activations, masks, indices, views and writes: equal to plain, or refused as plain refuses."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from techniques.in_place_fusion import random_programs
from techniques.in_place_fusion.random_programs import SIDE, Unary
from techniques.saved_tensors import is_same
from torch import Tensor

from lightning_vram.techniques.activation_compression.stage import CompressionStage

NUM_CASES = int(os.environ.get("NUM_RANDOM_PROGRAMS", "300"))

NEW: list[Unary] = [
    F.relu,
    lambda x: F.relu(x) + 0.5,
    F.leaky_relu,
    F.relu6,
    torch.tanh,
    torch.sigmoid,
    lambda x: x * 2 + 1,
    lambda x: F.threshold(x, 0.1, 0.0),
    lambda x: F.dropout(x, 0.3),
    lambda x: F.alpha_dropout(x, 0.3, training=True),
    lambda x: torch.native_dropout(x, 0.4, True)[0],
    lambda x: F.dropout1d(x[None], 0.5)[0],
    lambda x: x.masked_fill(x > 0.4, 0.1),
    lambda x: x.sort(0).values,
    lambda x: x.gather(1, x.argsort(1)),
    lambda x: x.cummax(0).values,
    lambda x: x - x.max(1, keepdim=True).values,
    lambda x: F.max_pool1d(x, 3, 1, 1),
    lambda x: F.max_pool2d(x[None], 3, 1, 1, return_indices=True)[0][0],
    lambda x: F.layer_norm(x, (SIDE,)),
    lambda x: x.softmax(-1),
    lambda x: x.to(torch.bfloat16).relu().to(torch.float32),
    lambda x: F.max_unpool2d(*F.max_pool2d(x[None], 2, return_indices=True), 2)[0],
]
VIEWS: list[Unary] = [*random_programs.VIEWS, lambda x: x[1:3].repeat(3, 1)]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: a @ b / SIDE,
    lambda a, b: F.relu(a) @ b / SIDE,
    lambda a, b: a * torch.empty_like(b).bernoulli_(0.5).mul_(2),
    lambda a, b: a.gather(0, b.detach().argsort(0)),
    lambda a, b: torch.cat([F.relu(a), b])[2 : SIDE + 2],
]
WRITES: list[Callable[[Tensor, Tensor], object]] = [
    lambda a, b: a.add_(b.detach(), alpha=0.5),
    lambda a, b: a.mul_(0.5),
    lambda a, b: F.relu_(a),
    lambda a, b: F.leaky_relu_(a, 0.1),
    lambda a, b: F.threshold_(a, 0.1, 0.0),
    lambda a, b: a[1:3].zero_(),
    lambda a, b: F.relu_(a[1:4]),
    lambda a, b: a.t().mul_(1.5),
    lambda a, b: a.copy_(b),
    lambda a, b: a.detach().add_(0.25),
    lambda a, b: a.detach().bernoulli_(0.5),
    lambda a, b: a.data.mul_(1.5),
    lambda a, b: torch._foreach_mul_([a.detach()], 0.5),
    lambda a, b: F.dropout(a, 0.2, inplace=True),
]

UNARY = NEW + VIEWS
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(functions), st.integers(0, 9), st.integers(0, 9))
        for functions in (NEW, VIEWS, BINARY, WRITES)
    ),
    min_size=3,
    max_size=14,
)


def do_step(function: Callable[..., Tensor], first: int, second: int, tensors: list[Tensor]) -> None:
    a, b = tensors[-1 - first % len(tensors)], tensors[-1 - second % len(tensors)]
    try:
        result = function(a) if function in UNARY else function(a, b)
    except RuntimeError:  # a view that may not be written to: the same in both runs
        tensors.append(a * 1)
    else:
        tensors.extend([result] if function not in WRITES else [])


def run(
    program: list[tuple[Callable[..., Tensor], int, int]], context: AbstractContextManager[object], seed: int
) -> object:
    """Run ``program`` on a list of tensors that grows; return the loss and gradients, or how it was refused."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(SIDE, SIDE, generator=generator).requires_grad_() for _ in range(2)]
    tensors = [torch.randn(SIDE, SIDE, generator=generator), weights[0] * 1.5]
    torch.manual_seed(seed)
    with context:
        for step in program:
            do_step(*step, tensors)
        loss = sum((tensor * (index + 1)).square().mean() for index, tensor in enumerate(tensors[-3:]))
        loss = loss + (tensors[-1] @ weights[1]).square().mean()
    tensors.clear()
    return random_programs.outcome(loss, weights)


@pytest.mark.parametrize("num_cases", [60, pytest.param(NUM_CASES, marks=pytest.mark.slow)])
def test_random_programs_give_the_same_bits_or_the_same_refusal(num_cases) -> None:
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(program=steps, seed=st.integers(0, 3))
    def check(program, seed) -> None:
        expected = run(program, nullcontext(), seed)
        stage = CompressionStage(min_bytes=0)
        for _ in range(2):  # nothing is left of the first run
            got = run(program, stage, seed)
            if isinstance(expected, str) or isinstance(got, str):
                assert got == expected
            else:
                assert all(map(is_same, expected, got))

    check()
