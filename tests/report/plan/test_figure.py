"""The picture of a plan by matplotlib: words that can be read."""

import pytest
from support.plans import FUSION, OFFLOAD, checkpointing, measured, plan_of, tried

from lightning_vram.memory.units import GIB
from lightning_vram.planner.scheme import Part
from lightning_vram.report.drawing import as_figure

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image
from support.pictures import assert_no_text_meets_another

from lightning_vram.report.plan import picture, verdict

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


def figure_of(plan):
    return as_figure(picture(plan).svg())


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("found", PLANS.values(), ids=PLANS)
def test_no_number_covers_another(found):
    assert_no_text_meets_another(figure_of(plan_of(found)))


def test_one_that_is_far_slower_does_not_squeeze_the_rest():
    found = texts(figure_of(plan_of(CROWDED)))
    assert any(text.endswith(": 4.39x") for text in found)
    assert any(text.endswith("slower than the axis") for text in found)
    assert not any(text.endswith("slower than the axis") for text in texts(figure_of(plan_of())))


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


@pytest.mark.parametrize(("mib", "budget_bytes"), [(4000, 4 * GIB), (4000, 400 * GIB), (1, GIB)])
def test_a_run_that_fits_is_drawn_as_well(mib, budget_bytes):
    plan = plan_of((measured(mib=mib, ms=100),), budget_bytes)
    assert "1. the plan: baseline" in texts(figure_of(plan))


def test_files_are_of_their_kind_and_the_same_each_time(tmp_path):
    first = {}
    for _ in range(2):
        for suffix in (".png", ".svg", ".pdf", ".html"):
            plan_of().plot(tmp_path / f"plan{suffix}")
            found = (tmp_path / f"plan{suffix}").read_bytes()
            assert found == first.setdefault(suffix, found)
    assert image.imread(tmp_path / "plan.png").shape[1] == 2480
