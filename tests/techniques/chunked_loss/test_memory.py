"""What a head and its loss take, by the tracker."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_vram import track_memory
from lightning_vram.techniques.chunked_loss import apply_chunked_loss
from lightning_vram.techniques.chunked_loss.lazy_logits import find_chunk_rows


def peak_bytes(num_tokens: int, vocab_size: int, width: int, *, is_chunked: bool) -> int:
    """Of the head and its loss alone, forward and backward; without the weight and its gradient, which both have."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size, bias=False))
    net[0].requires_grad_(requires_grad=False)
    tokens = torch.randint(vocab_size, (num_tokens + 1,))[None]
    handle = apply_chunked_loss(net) if is_chunked else None
    with track_memory(net) as tracker:
        with handle.active() if handle else contextlib.nullcontext():
            loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    return tracker.timeline.peak_bytes - 3 * net[0].weight.nbytes


@pytest.mark.slow
def test_head_and_loss_take_a_tenth_at_the_vocabulary_of_gpt_2():
    plain, chunked = (peak_bytes(3072, 50257, 32, is_chunked=is_chunked) for is_chunked in (False, True))
    assert plain > 2.9 * 3072 * 50257 * 4  # logits, their logarithms and a gradient; the embedding is counted twice
    assert chunked < 0.10 * plain
    rows = find_chunk_rows("auto", torch.empty(3072, 32), 3072, 50257)
    hidden_bytes, chunk_bytes = 3072 * 32 * 4, rows * 50257 * 4
    assert chunked < 4 * chunk_bytes + 3 * hidden_bytes + 4 * 50257 * 32 * 4  # logits, their logarithms, two gradients


@pytest.mark.parametrize("num_tokens", [2048, 8192])
def test_twice_the_tokens_take_their_hidden_states_and_no_logits(num_tokens):
    one, two = (peak_bytes(count, 5000, 16, is_chunked=True) for count in (num_tokens, 2 * num_tokens))
    assert two - one < num_tokens * (16 * 4 * 3 + 8 * 6)  # hidden states, their gradient; targets, places
