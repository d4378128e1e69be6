"""What a forward keeps for its backward, counted by hand."""

import torch
from torch import nn

from lightning_vram.techniques.activation_checkpointing.compiled_budget import SavedBytesCounter


def test_counts_each_piece_once_and_nothing_that_is_alive_anyway():
    layer, batch = nn.Linear(8, 8), torch.ones(4, 8)
    kept = SavedBytesCounter([*layer.parameters(), batch])
    with kept.counting():
        hidden = layer(batch).sigmoid()  # keeps its result
        loss = (hidden * hidden.t().contiguous().t()).sum()  # and the copy; the result again
    assert kept.peak_bytes == 2 * hidden.nbytes
    loss.backward()


def test_counts_what_lives_at_the_same_time():
    kept = SavedBytesCounter([])
    weight = torch.ones(16, requires_grad=True)
    with kept.counting():
        for _ in range(3):
            weight.sigmoid().sum().backward()
    assert kept.peak_bytes == weight.nbytes
