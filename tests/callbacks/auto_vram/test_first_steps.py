"""What the first steps took, as a reason to go on with another scheme: numbers by hand."""

import pytest
from support.plans import CHECKPOINTING, FUSION, OFFLOAD

from lightning_vram.callbacks.auto_vram.decision import faster_scheme
from lightning_vram.estimation.step_time import StepTime
from lightning_vram.memory.units import MIB
from lightning_vram.planner.scheme import Found, Measured, Part, Scheme

BUDGET = 100 * MIB


def measured(*parts: Part, mib: int, compute: float, to_host: float = 0.0) -> Measured:
    return Measured(Scheme(parts), mib * MIB, 0, StepTime(compute, to_host=to_host))


PLAIN = measured(mib=200, compute=1.0)
RECOMPUTED = measured(CHECKPOINTING, mib=90, compute=1.3)
OFFLOADED = measured(OFFLOAD, mib=95, compute=1.0, to_host=1.35)


def choose(now: Measured, other: Measured, seconds: float) -> Scheme | None:
    return faster_scheme(Found(now, PLAIN, (PLAIN, now, other)), now.scheme, BUDGET, seconds)


def test_where_kernels_are_slower_than_modelled_copies_hide_behind_them():
    assert choose(RECOMPUTED, OFFLOADED, seconds=2.6) == OFFLOADED.scheme  # 2 times: 2.0 against 2.6, copies take 1.35


def test_where_kernels_are_faster_copies_do_not():
    assert choose(RECOMPUTED, OFFLOADED, seconds=0.65) is None  # half: the copies still take 1.35


@pytest.mark.parametrize(("seconds", "changes"), [(1.38, False), (1.40, True)])
def test_a_change_has_to_be_worth_three_percent(seconds, changes):
    assert (choose(RECOMPUTED, OFFLOADED, seconds) is not None) == changes  # 0.97 of it against 1.35: from 1.392 on


def test_what_waits_for_copies_says_nothing_of_kernels():
    assert choose(OFFLOADED, RECOMPUTED, seconds=9.9) is None


def test_what_does_not_fit_or_cannot_come_late_is_no_choice():
    assert choose(RECOMPUTED, measured(OFFLOAD, mib=101, compute=0.1), seconds=1.3) is None
    assert choose(RECOMPUTED, measured(FUSION, mib=50, compute=0.1), seconds=1.3) is None
    assert faster_scheme(Found(None, PLAIN, (PLAIN,)), RECOMPUTED.scheme, BUDGET, 1.0) is None  # nobody has run it
