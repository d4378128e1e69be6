"""The picture at the top of README.md, in small."""

import sys
from dataclasses import replace

import pytest
from support.parts import ROOT
from support.result_files import SPEED, write

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image
from support.pictures import assert_no_text_meets_another

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.benchmarks.points import read_panels
from lightning_vram.report.benchmarks.results import read_results
from tests.benchmarks import first_screen

MOST_BYTES = 150 * 1024
NAMES = [f"{type(part).__name__}()" for part in first_screen.packed_parts()]


@pytest.mark.slow
def test_it_says_whether_both_fit_and_what_was_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(first_screen, "SHAPE", (2, 64, 2, 64))
    monkeypatch.setattr(first_screen, "BATCH_SIZE", 16)
    plain, packed = (first_screen.estimate(parts) for parts in ([], first_screen.packed_parts()))
    assert packed.needed_bytes < plain.needed_bytes
    card = DeviceSpec("Card", (packed.needed_bytes + plain.needed_bytes) // 2)
    plain, packed = replace(plain, device=card), replace(packed, device=card)
    file = read_results(write(tmp_path / "speed.json", SPEED, device="AMD EPYC 9R14 " * 5))
    figure = first_screen.draw(plain, packed, " + ".join(NAMES), read_panels(file)[0], file.caption)
    left, middle, right = figure.axes
    assert left.get_title(loc="left") == f"plain: {format_bytes(plain.needed_bytes)}\nout of memory"
    assert middle.get_title(loc="left") == f"packed: {format_bytes(packed.needed_bytes)}\nfits, equal to the bit"
    assert left.get_ylim() == middle.get_ylim()
    assert all([card.memory_bytes] * 2 in [list(line.get_ydata()) for line in axes.lines] for axes in (left, middle))
    assert sorted(text.xy[1] for text in right.texts) == [100, 120, 300, 400]
    texts = [" ".join(text.get_text().split()) for text in figure.texts]
    assert {"Measured: GPT", file.caption} <= set(texts)
    assert any(text.startswith(f"packed: {' + '.join(NAMES)} The titles say") for text in texts)
    assert_no_text_meets_another(figure)
    output = tmp_path / "first_screen.png"
    monkeypatch.setattr(sys, "argv", ["first_screen", str(file.path), "-o", str(output)])
    first_screen.main()
    assert output.stat().st_size < MOST_BYTES
    assert capsys.readouterr().out.startswith(f"{output}: ")
    assert image.imread(output).shape[:2] == (1080, 2400)


def test_the_picture_of_the_readme_is_small():
    assert (ROOT / "lightning_vram" / "report" / "first_screen.png").stat().st_size < MOST_BYTES
