"""The picture by matplotlib: what stands where."""

import sys
from math import hypot

import pytest
from support.plans import FUSION, OFFLOAD, checkpointing, measured, plan_of, tried

from lightning_vram.memory.units import GIB
from lightning_vram.planner.parts import Part

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image

from lightning_vram.report.plan.figure import draw
from lightning_vram.report.plan.words import verdict


def texts(figure) -> list[str]:
    (axes,) = figure.axes
    return [text.get_text() for text in (*figure.texts, *axes.texts)]


def test_each_choice_is_a_point_with_the_number_of_its_row():
    (axes,) = draw(plan_of()).axes
    numbers = {text.get_text(): text.xy for text in axes.texts if text.get_text().isdigit()}
    assert list(numbers) == [str(number) for number in range(1, 8)]
    assert numbers["1"] == (1.0, 4000 / 1024)
    assert numbers["5"] == pytest.approx((1.5, 1500 / 1024))
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    assert all(left < x < right and low < y < high for x, y in numbers.values())


def test_numbers_of_choices_that_are_close_to_each_other_can_be_read():
    close = [measured(FUSION, *[OFFLOAD] * n, mib=4000 - 90 * n, ms=100 + n) for n in range(1, 4)]
    figure = draw(plan_of((tried()[0], *close, measured(OFFLOAD, mib=1000, ms=400))))
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text().isdigit()]
    middles = [((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2) for box in boxes]
    points = 72 / figure.dpi
    apart = [hypot(a - c, b - d) * points for n, (a, b) in enumerate(middles) for c, d in middles[:n]]
    assert len(middles) == 5
    assert min(apart) > 17  # a marker's width
    markers = [line.get_window_extent() for line in axes.lines if line.get_marker() == "o" and line.get_zorder() == 4]
    assert [round((box.x0 + box.x1) / 2) for box in markers] == pytest.approx([x for x, _ in middles], abs=2)


def test_the_front_the_budget_and_all_that_was_tried_are_drawn():
    (axes,) = draw(plan_of()).axes
    (front,) = (line for line in axes.lines if line.get_drawstyle() == "steps-post")
    assert [round(x * 100) for x in front.get_xdata()] == [100, 110, 115, 120, 135, 180]
    assert [round(y * 1024) for y in front.get_ydata()] == [4000, 3000, 2040, 1990, 1000, 700]
    assert any(list(line.get_ydata()) == [2.0, 2.0] for line in axes.lines)  # GiB
    assert max(len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o") == 9


def test_words():
    found = texts(draw(plan_of()))
    assert verdict(plan_of()) in found
    assert "budget 2.00 GiB" in found
    assert "700.00 MiB, 34.2% of the budget, 1.80x, lossless" in found
    key = " ".join(found)
    assert "the plan: InPlaceFusion + ActivationCheckpointing(budget=950MiB)" in key


def test_no_words_leave_the_picture_or_meet():
    last = Part("lightning_vram.FSDPOffloadStrategy", {"offload": "params", "nvme_path": "/scratch/somewhere"})
    parts = (FUSION, OFFLOAD, checkpointing("123456MiB"))
    many = [measured(*parts, last, Part(f"p.P{n}"), mib=2000 - 100 * n, ms=100 + n) for n in range(9)]
    figure = draw(plan_of((tried()[0], *many), name="RTX PRO 6000 Blackwell Max-Q Workstation Edition"))
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in figure.texts]
    for box in (*boxes, *(text.get_window_extent() for text in axes.texts)):
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1
    key = [box for text, box in zip(figure.texts, boxes, strict=True) if text.get_text() != figure.texts[0].get_text()]
    assert not any(one.overlaps(other) for n, one in enumerate(key) for other in key[:n])


@pytest.mark.parametrize(("mib", "budget_bytes"), [(4000, 4 * GIB), (4000, 400 * GIB), (1, GIB)])
def test_a_run_that_fits_is_drawn_as_well(mib, budget_bytes):
    (axes,) = draw(plan_of((measured(mib=mib, ms=100),), budget_bytes)).axes
    assert [text.get_text() for text in axes.texts if text.get_text().isdigit()] == ["1"]


def test_files_are_of_their_kind_and_the_same_each_time(tmp_path):
    first = {}
    for _ in range(2):
        for suffix in (".png", ".svg", ".pdf"):
            plan_of().plot(tmp_path / f"plan{suffix}")
            found = (tmp_path / f"plan{suffix}").read_bytes()
            assert found == first.setdefault(suffix, found)
    assert image.imread(tmp_path / "plan.png").shape[:2] == (1200, 2400)


def test_bad_paths(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"^plot\(path\) must end in one of \.png, \.svg, \.pdf, got 'plan\.html'\.$"):
        plan_of().plot("plan.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        plan_of().plot(tmp_path / "plan.png")
    assert str(caught.value) == "a picture needs matplotlib: pip install matplotlib."
