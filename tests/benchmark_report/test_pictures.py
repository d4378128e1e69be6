"""The pictures of files of results: what stands where."""

import pytest
from support.result_files import BIGGEST, SPEED, write

pytest.importorskip("matplotlib", reason="the extra plots")
from support.pictures import assert_no_text_meets_another

from tests.benchmarks.report import read_results
from tests.benchmarks.report.bar_chart import draw_bars
from tests.benchmarks.report.bars import read_bars
from tests.benchmarks.report.points import read_panels
from tests.benchmarks.report.scatter import draw_scatter

CAPTION = "x86_64, 1 threads, torch 2.13.0+cpu, file of 2026-11-24"


def test_no_name_meets_another_or_leaves_the_picture(tmp_path):
    file = read_results(write(tmp_path / "a.json", SPEED))
    figure = draw_scatter(read_panels(file), file.caption)
    (axes,) = figure.axes
    assert {text.get_text(): text.xy for text in axes.texts} == {"1": (1.0, 400), "2": (1.125, 300), "3": (1.25, 100)}
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
