"""The pictures of README.md and of the page of estimate_memory, of small models."""

import sys

import pytest

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image
from support.pictures import assert_no_text_meets_another

from lightning_vram.memory.units import format_bytes
from lightning_vram.report.comparison import draw_steps
from tests.benchmarks import first_screen

SMALL = ((2, 64, 2, 64), 16)


@pytest.mark.slow
def test_both_are_drawn_by_one_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(first_screen, "LARGE", SMALL)
    monkeypatch.setattr(first_screen, "MEDIUM", SMALL)
    steps, notes = first_screen.before_after()
    baseline, optimized = (step.estimate for step in steps)
    assert optimized.needed_bytes < baseline.needed_bytes
    assert (
        notes[-1] == "With lightning_vram: callbacks=[ActivationCheckpointing(), ActivationOffload(), EarlyRelease()]"
    )
    figure = draw_steps(steps, notes)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"Baseline: {format_bytes(baseline.needed_bytes)}\nfits",
        f"With lightning_vram: {format_bytes(optimized.needed_bytes)}\nfits, bit-exact",
    ]
    assert_no_text_meets_another(figure)
    paths = [tmp_path / "before_after.png", tmp_path / "step.png"]
    monkeypatch.setattr(sys, "argv", ["first_screen", f"--before_after={paths[0]}", f"--step={paths[1]}"])
    first_screen.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [str(path) for path in paths]
    assert [image.imread(path).shape[:2] for path in paths] == [(750, 2000), (1200, 2400)]


def test_a_picture_with_fewer_colors_keeps_the_frequent_ones(tmp_path):
    from PIL import Image

    path = tmp_path / "a.png"
    picture = Image.new("RGB", (100, 10), (213, 94, 0))
    for x in range(100):
        for y in range(9):  # 900 colors, once each
            picture.putpixel((x, y), (x, y, 200))
    picture.save(path)
    first_screen.shrink(path)
    with Image.open(path) as small:
        assert small.mode == "P"
        assert {small.convert("RGB").getpixel((x, 9)) for x in range(100)} == {(213, 94, 0)}
