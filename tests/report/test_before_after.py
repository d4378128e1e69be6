"""Steps side by side: one scale, one limit, and titles that compare."""

from dataclasses import replace

import pytest
import torch
from support.pages import ROOT
from torch import nn

pytest.importorskip("matplotlib", reason="the extra plots")
from support.pictures import assert_no_text_meets_another

from lightning_vram import track_memory
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.comparison import ShownStep, as_estimate, draw_steps


def tracked(width, *, limit_bytes=None):
    """Track a step of one linear layer."""
    layer = nn.Linear(width, width)
    with track_memory(layer) as memory:
        layer(torch.ones(8, width)).sum().backward()
    return as_estimate(memory.timeline, limit_bytes)


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_both_steps_have_the_scale_of_the_larger_and_the_line_of_the_limit():
    large, small = tracked(64, limit_bytes=20_000), tracked(32, limit_bytes=20_000)
    assert small.peak_bytes < 20_000 < large.peak_bytes
    figure = draw_steps(
        [ShownStep("Baseline", large), ShownStep("With lightning_vram", small)], ["one note", "another"]
    )
    assert titles(figure) == [
        f"Baseline: {format_bytes(large.peak_bytes)}\nabove the limit",
        f"With lightning_vram: {format_bytes(small.peak_bytes)}\nwithin the limit",
    ]
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    assert all([20_000] * 2 in [list(line.get_ydata()) for line in axes.lines] for axes in figure.axes)
    assert [text.get_text() for axes in figure.axes for text in axes.texts if "limit" in text.get_text()] == [
        f"limit: {format_bytes(20_000)}"
    ]
    assert "one note\nanother" in [text.get_text() for text in figure.texts]
    assert_no_text_meets_another(figure)


def test_an_estimated_step_says_whether_it_fits_its_gpu():
    step = replace(tracked(64), device=DeviceSpec("Card", 1000), context_bytes=100)
    figure = draw_steps([ShownStep("Baseline", step, ("fits", "out of memory"))])
    assert titles(figure) == [f"Baseline: {format_bytes(step.peak_bytes + 100)}\nout of memory"]
    (legend,) = figure.legends
    assert legend.get_texts()[-1].get_text() == "CUDA context"


def test_without_a_limit_the_title_has_the_peak_only():
    step = tracked(64)
    figure = draw_steps([ShownStep("Training step", step)])
    assert titles(figure) == [f"Training step: {format_bytes(step.peak_bytes)}"]
    (axes,) = figure.axes
    assert len(axes.lines) == sum(span > 0 for span in _starts(axes))
    assert_no_text_meets_another(figure)


def _starts(axes):
    """Where a phase begins there is a white line."""
    return [line.get_xdata()[0] for line in axes.lines]


def test_a_step_without_tensors_is_an_error():
    with track_memory() as memory:
        pass
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_steps([ShownStep("Baseline", as_estimate(memory.timeline))])


@pytest.mark.parametrize("name", ["examples/first_screen.png", "lightning_vram/estimation/step.png"])
def test_pictures_of_pages_are_small(name):
    assert (ROOT / name).stat().st_size < 100 * 1024
