"""Fewer tokens at a time where the device is full."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram.techniques.chunked_loss import apply_chunked_loss, lazy_logits
from lightning_vram.techniques.chunked_loss.lazy_logits import ChunkRows
from tests.support.devices import DEVICE, allow_bytes, device_module

MIB = 1024**2
NUM_TOKENS, WIDTH, NUM_CLASSES = 512, 16, 1000
LASTING = 4 * (2 * NUM_CLASSES + NUM_TOKENS) * WIDTH
ROW = 5 * 4 * NUM_CLASSES


class Room:
    """What a device has left."""

    left = 0

    def room_bytes(self) -> int:
        return self.left


@pytest.fixture
def room(monkeypatch):
    room = Room()
    monkeypatch.setattr(lazy_logits, "free_memory_of", lambda device: room)
    return room


def ask(rows: ChunkRows, hidden: Tensor | None = None, *, asks: bool = True) -> int:
    return rows(torch.empty(NUM_TOKENS, WIDTH) if hidden is None else hidden, NUM_TOKENS, NUM_CLASSES, asks=asks)


def test_a_chunk_has_fewer_tokens_where_the_device_has_no_room(room):
    rows = ChunkRows("auto")
    room.left = (LASTING + 128 * ROW) * 10 // 9 + 1
    assert ask(rows) == 128  # as everywhere
    room.left -= ROW
    assert ask(rows, asks=False) == 128
    assert ask(rows, torch.empty(NUM_TOKENS, WIDTH, device="meta").as_subclass(Other)) == 256
    assert ask(rows) == 64
    room.left = 10 * LASTING + 1000 * ROW
    assert ask(rows) == ask(rows, asks=False) == 64  # what a checkpoint runs again has the chunks of its first run
    room.left = 0
    assert ask(rows) == 16
    assert ask(ChunkRows(100)) == 100


class Other(Tensor):
    """Without values."""


@pytest.mark.device
@pytest.mark.sim
def test_a_loss_fits_that_would_not():
    """Of chunks that the shape asks for, 256 tokens, one takes a MiB each of logits, logarithms and two gradients."""
    tokens = torch.arange(NUM_TOKENS, device=DEVICE) % NUM_CLASSES
    torch.manual_seed(0)
    hidden = torch.randn(1, NUM_TOKENS, WIDTH).to(DEVICE).requires_grad_()
    net = nn.Sequential(nn.Embedding(NUM_CLASSES, 1), nn.Linear(WIDTH, NUM_CLASSES)).to(DEVICE)
    found = []

    def step(chunk) -> None:
        handle = apply_chunked_loss(net, chunk=chunk)
        try:
            with handle.active():
                loss = F.cross_entropy(net[1](hidden).flatten(0, 1), tokens)
            found.append([loss.detach(), *torch.autograd.grad(loss, [hidden, *net[1].parameters()])])
        finally:
            handle.remove()

    step(256)
    device_module().empty_cache()
    allow_bytes(device_module().memory_allocated() + LASTING + 2 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        step(256)
    device_module().empty_cache()
    step("auto")
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu())
