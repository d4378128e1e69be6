"""The picture by matplotlib: what stands where."""

import sys

import pytest
from support.plans import FUSION, OFFLOAD, checkpointing, measured, plan_of, tried

from lightning_vram.memory.units import GIB
from lightning_vram.planner.scheme import Part

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from lightning_vram.report.plan import choices, draw, verdict

CROWDED = (
    tried()[0],
    *(measured(FUSION, *[OFFLOAD] * n, mib=2060 - 25 * n, ms=113 + n) for n in range(1, 7)),
    measured(OFFLOAD, mib=1600, ms=439),
)
PLANS = {
    "apart": tried(),
    "close": CROWDED[:-1],
    "close, and one far slower": CROWDED,
    "two far slower": (*CROWDED, measured(FUSION, FUSION, mib=1000, ms=500)),
    "alike": (tried()[0], *(measured(*[OFFLOAD] * n, mib=1990, ms=120) for n in range(1, 4))),
}


def texts(figure) -> list[str]:
    (axes,) = figure.axes
    return [text.get_text() for text in (*figure.texts, *axes.texts, *axes.get_legend().get_texts())]


def markers(axes) -> list:
    return [line for line in axes.lines if line.get_zorder() == 4]


@pytest.mark.parametrize("found", PLANS.values(), ids=PLANS)
def test_each_marker_stands_where_its_choice_is(found):
    plan = plan_of(found)
    (axes,) = draw(plan).axes
    end = axes.get_xlim()[1]
    rows = choices(plan)
    assert len(markers(axes)) == len(rows)
    for number, (row, line, label) in enumerate(zip(rows, markers(axes), axes.texts, strict=True), start=1):
        is_slower = row.step_time_ratio > end
        place = (end if is_slower else row.step_time_ratio, row.needed_bytes / GIB)
        assert line.get_xydata().tolist() == [[*place]]
        assert label.xy == place
        assert line.get_marker() == (">" if is_slower else "o")
        assert label.get_text() == (f"{number}: {row.step_time_ratio:.2f}x" if is_slower else str(number))


@pytest.mark.parametrize("found", PLANS.values(), ids=PLANS)
def test_no_number_covers_another_or_a_marker(found):
    figure = draw(plan_of(found))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    numbers = [Text.get_window_extent(text) for text in axes.texts]  # without the line to its marker
    points = figure.dpi / 72
    dots = [
        Bbox.from_bounds(x - 4 * points, y - 4 * points, 8 * points, 8 * points)
        for x, y in (axes.transData.transform(line.get_xydata()[0]) for line in markers(axes))
    ]
    for number, box in enumerate(numbers):
        assert not any(box.overlaps(other) for other in (*dots, *numbers[:number]))
        assert axes.bbox.x0 <= box.x0 < box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0 < box.y1 <= axes.bbox.y1


def test_one_that_is_far_slower_does_not_squeeze_the_rest():
    (axes,) = draw(plan_of(CROWDED)).axes
    left, right = axes.get_xlim()
    assert left < 1.0 < 1.19 < right < 1.3
    assert any(text.get_text().endswith(": 4.39x") for text in axes.texts)
    assert "slower than the axis" in texts(axes.figure)
    assert "slower than the axis" not in texts(draw(plan_of()))


def test_the_front_the_budget_and_all_that_was_tried_are_drawn():
    (axes,) = draw(plan_of()).axes
    (front,) = (line for line in axes.lines if line.get_zorder() == 3)
    assert [round(x * 100) for x in front.get_xdata()[::2]] == [100, 110, 115, 120, 135, 180]
    assert [round(y * 1024) for y in front.get_ydata()[::2]] == [4000, 3000, 2040, 1990, 1000, 700]
    assert list(front.get_xdata()[1::2]) == list(front.get_xdata()[2::2])  # stairs
    assert any(list(line.get_ydata()) == [2.0, 2.0] for line in axes.lines)  # GiB
    (dots,) = (line for line in axes.lines if line.get_zorder() == 2 and line.get_marker() == "o")
    assert len(dots.get_xdata()) == 9 - 7  # tried, and no choice


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
    figure.draw_without_rendering()
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
        for suffix in (".png", ".svg", ".pdf", ".html"):
            plan_of().plot(tmp_path / f"plan{suffix}")
            found = (tmp_path / f"plan{suffix}").read_bytes()
            assert found == first.setdefault(suffix, found)
    assert image.imread(tmp_path / "plan.png").shape[:2] == (1200, 2400)


def test_bad_paths(monkeypatch, tmp_path):
    with pytest.raises(
        ValueError, match=r"^plot\(path\) must end in one of \.png, \.svg, \.pdf, \.html, got 'a\.gif'\.$"
    ):
        plan_of().plot("a.gif")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        plan_of().plot(tmp_path / "plan.png")
    message = "a picture needs matplotlib: pip install matplotlib. A page (plan.html) needs nothing."
    assert str(caught.value) == message
    plan_of().plot(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").exists()
