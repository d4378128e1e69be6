"""Fake tensors on a card that is not there, in each of these tests."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_vram.memory.estimate.cuda_semantics import cuda_semantics
from lightning_vram.memory.estimate.fake_device import foreach_takes_fakes


@pytest.fixture
def card(monkeypatch):
    """Enter it for a compute capability; left at the end of the test."""
    entered = []

    def enter(*compute_capability):
        monkeypatch.setattr(torch, "lazy", torch.cuda, raising=False)  # checkpoints ask the device's module
        for context in (
            FakeTensorMode(allow_non_fake_inputs=True),
            foreach_takes_fakes(),  # as fake_device does
            cuda_semantics(compute_capability or (8, 9)),
        ):
            result = context.__enter__()
            entered.append(context)
        return result

    yield enter
    for context in reversed(entered):
        context.__exit__(None, None, None)
