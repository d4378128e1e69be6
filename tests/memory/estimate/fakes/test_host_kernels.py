"""Fakes on the host against real tensors there: shapes, dtypes and memory of what is returned."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from lightning_vram import track_memory
from lightning_vram.memory.estimate.known_values import KnownValues
from lightning_vram.private_names.dispatcher import FakeTensorMode

_IN_16_BITS = torch.bfloat16


def _images(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(4, 8, 6, 6, dtype=dtype)


_CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(8), _images),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(8).eval(), _images),
    "batch norm of 16 bits": (lambda: nn.BatchNorm2d(8), lambda: _images(_IN_16_BITS)),
    "batch norm all in 16 bits": (lambda: nn.BatchNorm2d(8, dtype=_IN_16_BITS), lambda: _images(_IN_16_BITS)),
    "layer norm of 16 bits": (lambda: nn.LayerNorm(6), lambda: _images(_IN_16_BITS)),
    "sum of a bag": (lambda: nn.EmbeddingBag(10, 8, mode="sum"), lambda: torch.ones(4, 3, dtype=torch.long)),
}


def _events(case: str, *, is_fake: bool, needs_gradient: bool) -> list[tuple[int, str]]:
    make_module, make_input = _CASES[case]
    with ExitStack() as stack:
        if is_fake:
            stack.enter_context(FakeTensorMode())
            stack.enter_context(KnownValues())
        module, given = make_module(), make_input()
        given.requires_grad_(needs_gradient and given.is_floating_point())
        with track_memory(module, inputs=given) as tracker:
            result: Any = module(given)
            if result.requires_grad:
                result.sum().backward()
    timeline = tracker.timeline
    return [(event.change_bytes, timeline.allocations[event.allocation].op) for event in timeline.events]


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("case", _CASES)
def test_fakes_take_the_memory_of_real_results(case: str, needs_gradient: bool) -> None:
    real, fake = (_events(case, is_fake=is_fake, needs_gradient=needs_gradient) for is_fake in (False, True))

    assert fake == real
