"""The pictures of files of results: what stands where."""

import sys

import pytest
from support.result_files import BIGGEST, SPEED, failed, way, write

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image
from support.pictures import assert_no_text_meets_another

from lightning_vram.report.tables import wrap_name
from tests.benchmarks.report import read_results, save_pictures
from tests.benchmarks.report.bar_chart import draw_bars
from tests.benchmarks.report.bars import read_bars, read_peak_bars
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


def test_axes_and_caption_say_what_was_measured(tmp_path):
    figure = scatter(tmp_path, SPEED)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "tracked peak of the step, MiB"
    assert axes.get_xlabel() == "step time relative to baseline (500.0 ms)"
    rows = [{**way("A()", "ours", 1, 1.0, max_memory_allocated_bytes=3 << 30), "seconds_of_first": None}]
    (axes,) = scatter(tmp_path, rows).axes
    assert axes.get_ylabel() == "max_memory_allocated of the step, GiB"
    assert axes.get_xlabel() == "step time, seconds"
    assert list(axes.lines[-1].get_ydata()) == [3.0]


@pytest.mark.parametrize("rows", [SPEED, crowd(4), crowd(30)], ids=["speed", "close", "crowd"])
def test_no_name_meets_another_or_leaves_the_picture(rows, tmp_path):
    figure = scatter(tmp_path, rows)
    (axes,) = figure.axes
    assert len(axes.texts) >= 2
    assert_no_text_meets_another(figure)


def test_each_workload_has_a_panel(tmp_path):
    figure = scatter(tmp_path, [*SPEED, *({**row, "workload": "ResNet"} for row in crowd(30))])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["GPT", "ResNet"]
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


def test_long_names_are_broken_where_people_would():
    assert wrap_name('ActivationCheckpointing(save=SavePolicy("matmuls", 2))', 44) == [
        "ActivationCheckpointing(",
        'save=SavePolicy("matmuls", 2))',
    ]
    assert wrap_name("FusedLinearCrossEntropy(), two-pass", 30) == ["FusedLinearCrossEntropy(),", "two-pass"]


def test_peaks_are_bars_where_no_time_was_measured_or_memory_ran_out(tmp_path):
    assert read_peak_bars(read_results(write(tmp_path / "a.json", SPEED))) == []
    short = [failed("plain", "plain", "out of memory"), *SPEED[1:]]
    (panel,) = read_peak_bars(read_results(write(tmp_path / "b.json", short)))
    assert [bar.text for bar in panel.bars] == ["100.00 MiB", "120.00 MiB", "300.00 MiB", "OOM"]
    tracked = [{name: value for name, value in row.items() if "seconds" not in name} for row in SPEED]
    (panel,) = read_peak_bars(read_results(write(tmp_path / "c.json", tracked)))
    assert panel.bars[0].text == "100.00 MiB  (0.25x)"
    figure = draw_bars([panel], CAPTION)
    assert figure.texts[0].get_text() == "Peak of the step: GPT"
    assert_no_text_meets_another(figure)


@pytest.mark.slow
def test_files_are_named_after_what_they_show(tmp_path):
    (tmp_path / "other").mkdir()
    paths = [
        write(tmp_path / "a.json", SPEED),
        write(tmp_path / "b.json", BIGGEST),
        write(tmp_path / "c.json", [{"x": 1}]),
    ]
    paths.append(write(tmp_path / "other" / "a.json", SPEED[:2]))
    saved = save_pictures([read_results(path) for path in paths], tmp_path / "new" / "pictures")
    assert [path.name for path in saved] == ["a_peak_and_time.png", "b_biggest.png", "a_peak_and_time_2.png"]
    assert image.imread(saved[0]).shape[:2] == (1190, 2400)


def test_without_matplotlib_there_is_one_error_where_there_is_something_to_draw(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    nothing = read_results(write(tmp_path / "a.json", [failed("A()", "ours", "needs a GPU")]))
    assert save_pictures([nothing], tmp_path) == []
    something = read_results(write(tmp_path / "b.json", SPEED))
    with pytest.raises(ModuleNotFoundError) as caught:
        save_pictures([nothing, something], tmp_path)
    assert str(caught.value) == "a picture needs matplotlib: pip install matplotlib."
