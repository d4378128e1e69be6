"""Pictures of pages, and a tracked step in the form of an estimate."""

import pytest
import torch
from support.pages import ROOT
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


def test_a_step_without_tensors_is_an_error():
    with track_memory() as memory:
        pass
    with pytest.raises(ValueError, match="nothing to draw"):
        side_by_side({"Baseline": as_estimate(memory.timeline, None)}, "Peak memory")


@pytest.mark.parametrize("name", ["examples/first_screen.png", "lightning_vram/estimation/step.png"])
def test_pictures_of_pages_are_small(name):
    assert (ROOT / name).stat().st_size < 100 * 1024
