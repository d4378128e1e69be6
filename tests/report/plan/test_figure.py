"""The picture of a plan: by matplotlib, with words that can be read, and its page."""

import re
from xml.etree import ElementTree

import pytest
from support.plans import FUSION, OFFLOAD, checkpointing, measured, plan_of, tried

from lightning_vram.memory.units import GIB
from lightning_vram.planner.scheme import Part
from lightning_vram.report.drawing import WIDTH, as_figure

pytest.importorskip("matplotlib", reason="the extra plots")
from support.pictures import assert_no_text_meets_another

from lightning_vram.report.plan import picture, verdict


def figure_of(plan):
    return as_figure(picture(plan).svg())


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_words():
    found = texts(figure_of(plan_of()))
    assert {verdict(plan_of()), "budget 2.00 GiB", "700.00 MiB", "34.2%", "1.80x", "lossless"} <= set(found)
    assert "3. the plan: InPlaceFusion + ActivationCheckpointing( budget=950MiB)" in " ".join(found)


def test_long_names_are_wrapped():
    last = Part("lightning_vram.FSDPOffloadStrategy", {"offload": "params", "nvme_path": "/scratch/somewhere"})
    parts = (FUSION, OFFLOAD, checkpointing("123456MiB"))
    many = [measured(*parts, last, Part(f"p.P{n}"), mib=2000 - 100 * n, ms=100 + n) for n in range(9)]
    plan = plan_of((tried()[0], *many), name="RTX PRO 6000 Blackwell Max-Q Workstation Edition")
    assert_no_text_meets_another(figure_of(plan))


def test_a_run_that_fits_is_drawn_as_well():
    plan = plan_of((measured(mib=4000, ms=100),), 4 * GIB)
    assert "1. the plan: baseline" in texts(figure_of(plan))


def drawing_of(plan) -> tuple[ElementTree.Element, list[tuple[float, float]]]:
    drawing = ElementTree.fromstring(re.search(r"<svg.*?</svg>", picture(plan).page())[0])
    marks = [found for found in drawing if (found.get("class") or "").startswith("mark")]
    return drawing, [(float(found.get("cx")), float(found.get("cy"))) for found in marks]


def test_markers_are_in_order_of_their_times_and_sizes():
    _, places = drawing_of(plan_of())
    assert len(places) == 7
    first, plan, last = places[0], places[2], places[6]  # 4000, 2040, 700 MiB; 1.0, 1.15, 1.8 times
    assert (plan[0] - first[0]) / (last[0] - first[0]) == pytest.approx(0.15 / 0.8, abs=0.01)
    assert (plan[1] - first[1]) / (last[1] - first[1]) == pytest.approx(1960 / 3300, abs=0.01)


def test_one_that_is_far_slower_stands_at_the_edge_and_nothing_leaves_the_drawing():
    drawing, places = drawing_of(plan_of((*tried(), measured(OFFLOAD, OFFLOAD, mib=600, ms=900))))
    assert places[7][0] == max(x for x, _ in places)
    assert "9.00x" in [found.text for found in drawing if found.tag == "text"]
    for found in drawing:
        if found.tag in ("rect", "text", "circle"):
            assert 0 <= float(found.get("x") or found.get("cx")) <= WIDTH
            assert 0 <= float(found.get("y") or found.get("cy")) <= 460


def test_the_table_has_every_choice():
    text = picture(plan_of()).page()
    assert '<h1 class="good">Fits with this plan: 1.99 GiB of 2.00 GiB on H100, 1.15x the step time</h1>' in text
    name = "3. the plan: InPlaceFusion + ActivationCheckpointing(budget=950MiB)"
    cells = "<td>1.99 GiB</td><td>99.6%</td><td>1.15x</td><td>exact</td>"
    assert f"<tr><td colspan=9>{name}</td></tr><tr>{cells}</tr>" in text
    assert text.count("<td colspan=9>") == 7
