"""The picture of a plan by matplotlib: words that can be read."""

import pytest
from support.plans import FUSION, OFFLOAD, checkpointing, measured, plan_of, tried

from lightning_vram.memory.units import GIB
from lightning_vram.planner.scheme import Part
from lightning_vram.report.drawing import as_figure

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
