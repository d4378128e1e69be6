"""Which of all that was tried is shown."""

from support.plans import FUSION, OFFLOAD, measured, plan_of, tried

from lightning_vram.planner.scheme import Found, Part
from lightning_vram.report.plan import choices


def unbeaten(tried):
    return Found(None, tried[0], tuple(tried)).unbeaten


def test_the_front_is_what_no_other_beats():
    assert [(one.needed_bytes >> 20, round(one.seconds * 1000)) for one in unbeaten(tried()[::-1])] == [
        *((4000, 100), (3000, 110), (2040, 115), (1990, 120), (1985, 121), (1000, 135), (700, 180))
    ]
    same = [measured(FUSION, mib=5, ms=100), measured(OFFLOAD, mib=4, ms=100)]
    assert unbeaten(same) == (same[1],)


def test_what_is_close_to_another_is_shown_once_and_what_is_beaten_for_its_parts():
    found = choices(plan_of())
    assert [(one.name, one.needed_bytes >> 20) for one in found] == [
        ("baseline", 4000),
        ("InPlaceFusion", 3000),
        ("InPlaceFusion + ActivationCheckpointing(budget=950MiB)", 2040),
        ("ActivationCheckpointing(budget=905MiB)", 1990),
        ("ActivationOffload", 1500),
        ("ActivationCheckpointing", 1000),
        ("MicroBatching(size=2)", 700),
    ]
    assert [one.is_plan for one in found].index(True) == 2
    assert [one.fits for one in found] == [False, False, True, True, True, True, True]
    assert {one.results for one in found[:-1]} == {"exact"}
    assert found[-1].results == "lossless"
    assert (round(found[4].share, 3), round(found[4].step_time_ratio, 3)) == (0.732, 1.5)


def test_of_many_those_near_the_plan_are_shown():
    many = [measured(Part(f"p.P{number}"), mib=4000 - 100 * number, ms=100 + number) for number in range(1, 31)]
    found = choices(plan_of((tried()[0], *many)))
    assert [one.needed_bytes >> 20 for one in found] == [4000, 2300, 2200, 2100, 2000, 1900, 1800, 1700]
