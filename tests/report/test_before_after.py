"""Pictures of pages, and a tracked step in the form of an estimate."""

import torch
from torch import nn

from lightning_vram import track_memory
from lightning_vram.report.estimate import as_estimate, picture, side_by_side


def test_a_tracked_step_is_held_against_a_limit():
    layer = nn.Linear(64, 64)
    with track_memory(layer) as memory:
        layer(torch.ones(8, 64)).sum().backward()
    tight = as_estimate(memory.timeline, 20_000)
    assert tight.peak_bytes == memory.timeline.peak_bytes > 20_000
    assert not tight.fits
    assert "limit 19.53 KiB" in picture(tight).svg()
    free = as_estimate(memory.timeline, None)
    assert free.fits
    assert 'class="limit' not in side_by_side({"Training step": free}, "Peak memory").svg()
