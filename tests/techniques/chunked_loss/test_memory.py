"""What a head and its loss take, by the tracker."""

import contextlib

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


def test_head_and_loss_take_a_tenth_and_twice_the_tokens_only_their_hidden_states():
    num_tokens, vocab_size, width = 2048, 5000, 16
    plain = peak_bytes(num_tokens, vocab_size, width, is_chunked=False)
    one, two = (peak_bytes(count, vocab_size, width, is_chunked=True) for count in (num_tokens, 2 * num_tokens))
    assert plain > 2.9 * num_tokens * vocab_size * 4  # logits, their logarithms and a gradient
    assert one < 0.10 * plain
    rows = find_chunk_rows("auto", torch.empty(num_tokens, width), num_tokens, vocab_size)
    hidden_bytes, chunk_bytes = num_tokens * width * 4, rows * vocab_size * 4
    assert one < 4 * chunk_bytes + 3 * hidden_bytes + 4 * vocab_size * width * 4  # the last: two gradients
    assert two - one < num_tokens * (width * 4 * 3 + 8 * 6)  # hidden states, their gradient; targets, places
