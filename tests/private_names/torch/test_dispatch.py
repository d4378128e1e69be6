"""A fake mode that knows calls of operators again, and tells apart what torch's own tells apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_vram.private_names.dispatcher import FakeTensorMode, QuickFakeMode

CALLS: dict[str, Callable[[], Any]] = {
    "an integer and a float": lambda: [torch.zeros(3, dtype=torch.int64) * number for number in (2, 2.0)],
    "strides": lambda: [torch.zeros(3, 3).exp(), torch.zeros(3, 3).t().exp()],
    "shapes": lambda: [torch.zeros(6, 2) @ torch.zeros(2, n) for n in (3, 4)],
    "dtypes": lambda: [torch.zeros(3, dtype=dtype).cumsum(0) for dtype in (torch.float32, torch.bool)],
    "offsets of views": lambda: [torch.zeros(8)[start:].view(2, 2) for start in (4,)] + [torch.zeros(4).view(2, 2)],
    "gradients": lambda: [torch.zeros(3, requires_grad=flag).detach() for flag in (True, False)],
    "lists": lambda: [torch.cat([torch.zeros(2)] * number) for number in (2, 3)],
    "places of nothing": lambda: [torch.zeros(4, 4)[:, None], torch.zeros(4, 4)[None, :]],
}


def _facts(results: list[Tensor]) -> list[Any]:
    return [(r.shape, r.stride(), r.dtype, r.storage_offset(), r.device, r.untyped_storage().nbytes()) for r in results]


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_torch_tells_apart_are_told_apart(name: str) -> None:
    FakeTensorMode.cache_clear()
    with FakeTensorMode():
        expected = _facts(CALLS[name]())
    FakeTensorMode.cache_clear()
    with QuickFakeMode():
        assert _facts(CALLS[name]()) == expected
        assert _facts(CALLS[name]()) == expected  # known by now


def test_as_many_calls_are_known_again_as_in_torchs_own() -> None:
    def count(mode: FakeTensorMode) -> int:
        FakeTensorMode.cache_clear()
        with mode:
            x, weight = torch.zeros(4, 8), torch.zeros(8, 8, requires_grad=True)
            for _ in range(3):
                (torch.cat([x, x]) @ weight).relu().sum().backward()
        return FakeTensorMode.cache_info().hits

    assert count(QuickFakeMode()) == count(FakeTensorMode()) > 0
