"""The pictures of README.md and of the page of estimate_memory, of small models."""

import sys

import pytest

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image
from support.pictures import assert_no_text_meets_another

from lightning_vram.report.drawing import as_figure
from tests.benchmarks import first_screen

SMALL = ((2, 64, 2, 64), 16)


@pytest.mark.slow
def test_both_are_drawn_by_one_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(first_screen, "LARGE", SMALL)
    monkeypatch.setattr(first_screen, "MEDIUM", SMALL)
    picture = first_screen.before_after()
    assert picture.notes[-1] == (
        "With lightning_vram: callbacks=[ActivationCheckpointing(), ActivationOffload(), EarlyRelease()]"
    )
    figure = as_figure(picture.svg())
    found = [text.get_text() for text in figure.axes[0].texts]
    assert any(text.startswith("Baseline: fits, ") for text in found)
    assert any(text.startswith("With lightning_vram: bit-exact, ") for text in found)
    assert_no_text_meets_another(figure)
    paths = [tmp_path / "before_after.png", tmp_path / "step.png"]
    monkeypatch.setattr(sys, "argv", ["first_screen", f"--before_after={paths[0]}", f"--step={paths[1]}"])
    first_screen.main()
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [str(path) for path in paths]
    assert [image.imread(path).shape[1] for path in paths] == [2480] * 2
