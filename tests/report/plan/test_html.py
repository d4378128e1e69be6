"""The page of a plan: its drawings, measured, and its table."""

import re
from xml.etree import ElementTree

import pytest
from support.plans import plan_of

from lightning_vram.report.plan import picture


def drawing_of(plan) -> ElementTree.Element:
    return ElementTree.fromstring(re.search(r"<svg.*?</svg>", picture(plan).page())[0])


def marks_of(drawing) -> list[ElementTree.Element]:
    return [found for found in drawing if (found.get("class") or "").startswith("mark")]


def test_markers_are_in_order_of_their_times_and_sizes():
    marks = marks_of(drawing_of(plan_of()))
    assert len(marks) == 7
    places = [(float(found.get("cx")), float(found.get("cy"))) for found in marks]
    first, plan, last = places[0], places[2], places[6]  # 4000, 2040, 700 MiB; 1.0, 1.15, 1.8 times
    assert (plan[0] - first[0]) / (last[0] - first[0]) == pytest.approx(0.15 / 0.8, abs=0.01)
    assert (plan[1] - first[1]) / (last[1] - first[1]) == pytest.approx(1960 / 3300, abs=0.01)


def test_the_table_has_every_choice():
    text = picture(plan_of()).page()
    assert '<h1 class="good">Fits with this plan: 1.99 GiB of 2.00 GiB on H100, 1.15x the step time</h1>' in text
    name = "3. the plan: InPlaceFusion + ActivationCheckpointing(budget=950MiB)"
    cells = "<td>1.99 GiB</td><td>99.6%</td><td>1.15x</td><td>exact</td>"
    assert f"<tr><td colspan=9>{name}</td></tr><tr>{cells}</tr>" in text
    assert text.count("<td colspan=9>") == 7
