"""Pictures: SVG with its tables, and the same by matplotlib."""

import re
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.estimates import GIB, MIB, estimate_of, training_timeline

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.report.drawing import as_figure
from lightning_vram.report.estimate import ShownEstimate, picture, side_by_side

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image
from support.pictures import assert_no_text_meets_another


def figure_of(estimate):
    return as_figure(picture(estimate).svg())


def texts(figure) -> set[str]:
    return {text.get_text() for axes in figure.axes for text in axes.texts}


def test_words():
    found = texts(figure_of(estimate_of(max_batch_size=11)))
    assert {
        "Fits: 900.00 MiB of 1.00 GiB on RTX 4090",
        "peak of tensors 760.00 MiB",
        "reserved 800.00 MiB",
        "RTX 4090 minus context 924.00 MiB",
        *("forward", "backward", "optimizer step"),
        *("activations", "300.00 MiB", "parameters", "100.00 MiB"),
        *("batch", "8 samples", "largest batch that fits", "11 samples"),
        "one training step: 11 allocations and frees",
        "GiB",
    } <= found
    assert "inputs" not in found


@pytest.mark.parametrize("reserved_mib", [800, 1024, 123 * 1024])
def test_all_words_can_be_read(reserved_mib):
    device = DeviceSpec("RTX PRO 6000 Blackwell Max-Q Workstation Edition", GIB)
    (stage,) = estimate_of().stages.values()
    stages = {"train": replace(stage, reserved_bytes=reserved_mib * MIB, host_bytes=GIB, pinned_bytes=GIB)}
    changes = {"max_batch_size": 0, "max_sequence_length": 131072, "world_size": 8, "notes": ("note " * 60,)}
    estimate = replace(estimate_of(stages=stages, context_bytes=0, **changes), device=device)
    assert_no_text_meets_another(figure_of(estimate))


def test_steps_stand_side_by_side_on_one_scale():
    steps = {"Baseline": estimate_of(limit_bytes=600 * MIB), "With lightning_vram": estimate_of()}
    figure = as_figure(side_by_side(steps, "Peak memory", ["one note", "another"]).svg())
    assert {"Baseline", "With lightning_vram", "Peak memory", "one note", "another"} <= texts(figure)
    marks = [text.get_text() for text in figure.axes[0].texts if re.fullmatch(r"[\d.]+", text.get_text())]
    assert marks[: len(marks) // 2] == marks[len(marks) // 2 :]
    assert_no_text_meets_another(figure)


@pytest.mark.parametrize(("limit_bytes", "is_drawn"), [(600 * MIB, True), (2 * GIB, True), (80 * GIB, False)])
def test_the_limit_is_a_line_unless_it_would_press_the_step_to_the_ground(limit_bytes, is_drawn):
    svg = picture(estimate_of(limit_bytes=limit_bytes)).svg()
    assert ('class="limit' in svg) == is_drawn
    assert ("\N{UPWARDS ARROW}" in svg) != is_drawn


def test_files_are_of_their_kind_and_the_same_each_time(tmp_path):
    estimate = estimate_of(kind=ShownEstimate)
    first = {}
    for _ in range(2):
        for suffix in (".png", ".svg", ".pdf", ".html"):
            estimate.plot(tmp_path / f"step{suffix}")
            found = (tmp_path / f"step{suffix}").read_bytes()
            assert found == first.setdefault(suffix, found)
    assert image.imread(tmp_path / "step.png").shape[1] == 2480
    assert {found[:4] for found in first.values()} == {b"\x89PNG", b"<svg", b"%PDF", b"<!DO"}
    assert ElementTree.fromstring(first[".svg"]).tag == "{http://www.w3.org/2000/svg}svg"


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


def test_only_two_kinds_of_files_need_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    estimate = estimate_of(kind=ShownEstimate)
    for suffix in (".png", ".pdf"):
        with pytest.raises(ModuleNotFoundError) as caught:
            estimate.plot(tmp_path / f"step{suffix}")
        assert str(caught.value) == (
            f"step{suffix} needs matplotlib: pip install matplotlib. step.svg and step.html need nothing."
        )
    for suffix in (".html", ".svg"):
        estimate.plot(tmp_path / f"step{suffix}")
        assert (tmp_path / f"step{suffix}").exists()


def test_nothing_to_draw():
    with pytest.raises(ValueError, match=r"^nothing to draw: no tensor was on lazy:1\.$"):
        picture(estimate_of(training_timeline().on("lazy:1")))
