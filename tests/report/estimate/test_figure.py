"""The picture by matplotlib: what stands where."""

import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from support.estimates import GIB, MIB, allocation, estimate_of, timeline_of, training_timeline

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.tracking.timeline import Category, Phase
from lightning_vram.report.estimate.shown import ShownEstimate
from lightning_vram.report.estimate.step import COLORS

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import colors, image
from matplotlib.patches import StepPatch

from lightning_vram.report.estimate.pictures import draw


def texts(figure) -> set[str]:
    (axes,) = figure.axes
    found = (*figure.texts, *axes.texts, axes.xaxis.label, axes.yaxis.label)
    return {text.get_text() for text in found}


def areas(figure) -> list[StepPatch]:
    (axes,) = figure.axes
    return [patch for patch in axes.patches if isinstance(patch, StepPatch)]


def test_areas_are_stacked_from_what_stays_to_what_goes():
    stack = areas(draw(estimate_of()))
    kinds = (
        Category.PARAMETERS,
        Category.OPTIMIZER_STATE,
        Category.GRADIENTS,
        Category.ACTIVATIONS,
        Category.TEMPORARIES,
    )
    assert [colors.to_hex(area.get_facecolor()) for area in stack] == [COLORS[kind] for kind in kinds]
    at_the_peak = [area.get_data().values[5] / MIB for area in stack]
    assert at_the_peak == [100, 300, 400, 700, 760]  # the axis reads what the words say: no context below
    for low, high in pairwise(stack):
        assert list(high.get_data().baseline) == list(low.get_data().values)


def test_the_peak_is_marked_at_its_height():
    figure = draw(estimate_of())
    (axes,) = figure.axes
    (marker,) = (line for line in axes.lines if line.get_marker() == "o")
    assert marker.get_xydata().tolist() == [[5.5, 760 * MIB]]
    assert "peak of tensors 760.00 MiB" in texts(figure)


def test_words():
    found = texts(draw(estimate_of(max_batch_size=11)))
    assert {
        "Fits: 900.00 MiB of 1.00 GiB on RTX 4090",
        "reserved 800.00 MiB",
        "RTX 4090 minus context 924.00 MiB",
        *("forward", "backward", "optimizer step"),
        *("activations", "300.00 MiB", "parameters", "100.00 MiB"),
        *("batch", "8 samples", "largest batch that fits", "11 samples"),
        "one training step: 11 allocations and frees",
        "GiB",
    } <= found
    assert "inputs" not in found


def test_no_words_leave_the_picture():
    device = DeviceSpec("RTX PRO 6000 Blackwell Max-Q Workstation Edition", 96 * GIB)
    (stage,) = estimate_of().stages.values()
    stages = {"train": replace(stage, reserved_bytes=123 * GIB, host_bytes=GIB, pinned_bytes=GIB)}
    changes = {"max_batch_size": 0, "max_sequence_length": 131072, "world_size": 8}
    figure = draw(replace(estimate_of(stages=stages, **changes), device=device))
    figure.canvas.draw()
    (axes,) = figure.axes
    for text in (*figure.texts, *axes.texts):
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1, text


def test_without_a_context_none_is_spoken_of():
    found = texts(draw(estimate_of(context_bytes=0)))
    assert "RTX 4090 1.00 GiB" in found


@pytest.mark.parametrize(("limit_bytes", "is_drawn"), [(600 * MIB, True), (2 * GIB, True), (80 * GIB, False)])
def test_the_limit_is_a_line_unless_it_would_press_the_step_to_the_ground(limit_bytes, is_drawn):
    figure = draw(estimate_of(limit_bytes=limit_bytes))
    (axes,) = figure.axes
    heights = [line.get_ydata()[0] for line in axes.lines]
    assert (limit_bytes - 100 * MIB in heights) == is_drawn  # without the context
    assert 800 * MIB in heights
    assert axes.get_ylim()[1] < 4 * GIB
    assert any(text.endswith("\N{UPWARDS ARROW}") for text in texts(figure)) != is_drawn


def test_files_are_of_their_kind_and_the_same_each_time(tmp_path):
    estimate = estimate_of(kind=ShownEstimate)
    first = {}
    for _ in range(2):
        for suffix in (".png", ".svg", ".pdf", ".html"):
            estimate.plot(tmp_path / f"step{suffix}")
            found = (tmp_path / f"step{suffix}").read_bytes()
            assert found == first.setdefault(suffix, found)
    assert image.imread(tmp_path / "step.png").shape[:2] == (1200, 2400)
    assert {found[:4] for found in first.values()} == {b"\x89PNG", b"<?xm", b"%PDF", b"<!DO"}


def test_a_long_step_is_drawn_in_as_many_columns_as_can_be_seen():
    made = [allocation("a", "", Category.ACTIVATIONS) for _ in range(20_000)]
    changes = [(number, 1, Phase.FORWARD) for number in range(20_000)]
    figure = draw(estimate_of(timeline_of(made, changes + [(n, -1, Phase.BACKWARD) for n in range(20_000)])))
    assert len(areas(figure)[0].get_data().values) == 1600
    assert max(areas(figure)[-1].get_data().values) == 20_000 * MIB


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("step.gif", r"^plot\(path\) must end in one of \.png, \.svg, \.pdf, \.html, got 'step\.gif'\.$"),
        ("no/step.png", r"^plot\(path\): there is no folder 'no'\.$"),
    ],
)
def test_bad_paths(path, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        estimate_of(kind=ShownEstimate).plot(path)


def test_without_matplotlib_there_is_one_line_and_the_page(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    estimate = estimate_of(kind=ShownEstimate)
    with pytest.raises(ModuleNotFoundError) as caught:
        estimate.plot(tmp_path / "step.png")
    assert str(caught.value) == (
        "a picture needs matplotlib: pip install matplotlib. A page (step.html) needs nothing."
    )
    estimate.plot(tmp_path / "step.html")
    assert (tmp_path / "step.html").exists()


def test_it_begins_with_the_stage():
    (stage,) = estimate_of().stages.values()
    figure = draw(estimate_of(stages={"train": replace(stage, first_event=4)}))
    assert len(areas(figure)[0].get_data().values) == 10


@pytest.mark.parametrize("reserved_mib", [800, 1000, 1020, 1024, 1030, 1050, 1200])
def test_words_of_close_lines_can_be_read(reserved_mib):
    (stage,) = estimate_of().stages.values()
    stages = {"train": replace(stage, reserved_bytes=reserved_mib * MIB)}
    figure = draw(estimate_of(stages=stages, context_bytes=0, limit_bytes=GIB))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(box.overlaps(other) for number, box in enumerate(boxes) for other in boxes[:number])
    heights = [axes.transData.transform((0, size))[1] for size in (GIB, reserved_mib * MIB)]
    assert not any(box.y0 + 4 < y < box.y1 - 4 for box in boxes for y in heights)


def test_nothing_to_draw():
    with pytest.raises(ValueError, match=r"^nothing to draw: no tensor was on lazy:1\.$"):
        draw(estimate_of(training_timeline().on("lazy:1")))
