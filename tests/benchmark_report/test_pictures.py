"""The pictures of files of results: what stands where."""

import pytest
from support.result_files import BIGGEST, SPEED, way, write

pytest.importorskip("matplotlib", reason="the extra plots")
from support.pictures import assert_no_text_meets_another

from tests.benchmarks.report import read_results
from tests.benchmarks.report.bar_chart import draw_bars
from tests.benchmarks.report.bars import read_bars
from tests.benchmarks.report.points import read_panels
from tests.benchmarks.report.scatter import draw_scatter

CAPTION = "x86_64, 1 threads, torch 2.13.0+cpu, file of 2026-11-24"


def scatter(tmp_path, rows):
    file = read_results(write(tmp_path / "a.json", rows))
    return draw_scatter(read_panels(file), file.caption)


def crowd(num_points):
    """A front of ways that are nearly the same."""
    ways = [way(f"Technique{n}(argument={n})", "ours", 200 - n, 1.2 + n / 500) for n in range(num_points)]
    return [way("plain", "plain", 400, 1.0), *ways]


def test_points_marks_names_and_the_front(tmp_path):
    figure = scatter(tmp_path, SPEED)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    marks = {name: (line.get_marker(), list(line.get_xdata()), list(line.get_ydata())) for name, line in lines.items()}
    assert marks["baseline"] == ("D", [1.0], [400.0])
    assert marks["lightning_vram"] == ("o", [1.25, 1.125], [100.0, 300.0])
    assert marks["others"] == ("s", [1.5], [120.0])
    stairs = lines["Pareto front: nothing is smaller and faster"]
    assert list(stairs.get_xdata()) == [1.0, 1.125, 1.125, 1.25, 1.25]
    assert list(stairs.get_ydata()) == [400, 400, 300, 300, 100]
    assert {text.get_text(): text.xy for text in axes.texts} == {"1": (1.0, 400), "2": (1.125, 300), "3": (1.25, 100)}
    listed = [text.get_text() for text in figure.texts]
    assert listed == [
        *("1", "baseline", "400.00 MiB, 1.00x"),
        *("2", "InPlaceFusion()", "300.00 MiB, 1.12x"),
        *("3", "ActivationCheckpointing()", "100.00 MiB, 1.25x"),
        CAPTION,
    ]


@pytest.mark.parametrize("rows", [SPEED, crowd(4), crowd(30)], ids=["speed", "close", "crowd"])
def test_no_name_meets_another_or_leaves_the_picture(rows, tmp_path):
    figure = scatter(tmp_path, rows)
    (axes,) = figure.axes
    assert len(axes.texts) >= 2
    assert_no_text_meets_another(figure)


def test_bars_are_as_long_as_what_trains(tmp_path):
    panels = read_bars(read_results(write(tmp_path / "a.json", BIGGEST, "biggest")))
    figure = draw_bars(panels, CAPTION)
    batches, layers = figure.axes
    widths = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in batches.patches}
    assert widths == {0: 18, 1: 10, 2: 4}
    assert [text.get_text() for text in batches.texts] == ["18  (4.50x)", "10  (2.50x)", "4"]
    assert [text.get_text() for text in layers.texts] == ["31", "OOM"]
    names = [text.get_text() for text in batches.get_yticklabels()]
    assert names == ["AutoVRAM()", "torch.utils.checkpoint (PyTorch)", "baseline"]
    titles = ["Largest batch size within 300.00 MiB: GPT", "Most layers within 300.00 MiB: GPT", CAPTION]
    assert [text.get_text() for text in figure.texts] == titles
    assert_no_text_meets_another(figure)
