"""The share that a budget for compiled layers asks for, on curves written by hand."""

import re
from functools import partial

import pytest

from lightning_vram.private_names.dispatcher import LEAST_SHARE
from lightning_vram.techniques.activation_checkpointing.compiled_budget import (
    CLOSE_ENOUGH,
    MAX_MEASUREMENTS,
    CompiledBudgetError,
    ShareSearch,
)

CURVES = {
    "straight": lambda share: int(1000 + 9000 * share),
    "convex": lambda share: int(1000 + 9000 * share**2),
    "concave": lambda share: int(1000 + 9000 * (1 - (1 - share) ** 2)),
}


def run(curve, budget_bytes: int) -> ShareSearch:
    search = ShareSearch(budget_bytes)
    while (share := search.next_share()) is not None:
        search.note(share, curve(share))
    return search


@pytest.mark.parametrize("budget_bytes", [1000, 2000, 5000, 9000, 9900])
@pytest.mark.parametrize("name", CURVES)
def test_the_chosen_share_fits_and_is_close(name, budget_bytes):
    search = run(CURVES[name], budget_bytes)
    assert len(search.kept_bytes) <= MAX_MEASUREMENTS
    assert CLOSE_ENOUGH * budget_bytes <= search.kept_bytes[search.best] <= budget_bytes


def test_ends_with_the_first_share_that_is_close_enough():
    search = run(CURVES["straight"], 1030)
    assert search.kept_bytes == {LEAST_SHARE: 1000}  # 97.1 %
    assert CLOSE_ENOUGH < 1000 / 1030


def test_keeps_all_where_all_fits():
    search = run(CURVES["straight"], 20000)
    assert list(search.kept_bytes) == [LEAST_SHARE, 0.25, 0.5, 1.0]
    assert search.best == 1


def test_a_staircase_ends_below_the_step_that_is_too_high():
    search = run(lambda share: 1000 if share < 0.4 else 3000, 2000)
    assert 0.3 < search.best < 0.4
    assert search.kept_bytes[search.best] == 1000


def staircase(num_steps: int, share: float) -> int:
    """From 1000 to 9000, and from a share of 0.6 onwards flat, as the partitioner's; all of 10000 at 1."""
    return 10000 if share == 1 else 1000 + 8000 * int(min(share, 0.6) / 0.6 * num_steps) // num_steps


@pytest.mark.parametrize("budget_bytes", [1600, 3900, 5500, 6300, 8200, 9600])
def test_between_coarse_steps_the_one_below_is_taken_and_the_one_above_is_known(budget_bytes):
    search = run(partial(staircase, 4), budget_bytes)
    steps = [1000, 3000, 5000, 7000, 9000, 10000]
    assert search.kept_bytes[search.best] == max(step for step in steps if step <= budget_bytes)
    assert search.kept_bytes[search.next_above] == min(step for step in steps if step > budget_bytes)
    assert not search.is_close


@pytest.mark.parametrize("budget_bytes", [1600, 3900, 5500, 6300, 8200])
def test_fine_steps_fill_the_budget(budget_bytes):
    search = run(partial(staircase, 200), budget_bytes)
    assert CLOSE_ENOUGH * budget_bytes <= search.kept_bytes[search.best] <= budget_bytes
    assert search.is_close


def test_of_a_curve_that_falls_again_only_measured_points_are_believed():
    search = run(lambda share: 5000 if 0.2 < share < 0.3 else int(1000 + 1000 * share), 1800)
    assert search.kept_bytes[search.best] <= 1800


def test_refuses_what_the_least_share_exceeds():
    search = ShareSearch(1023)
    message = (
        "budget=1023 B is below the minimum of 1.00 KiB, which is saved for backward when the compiler recomputes "
        "all it can. Increase it, or use smaller batches."
    )
    with pytest.raises(CompiledBudgetError, match=f"^{re.escape(message)}$"):
        search.note(LEAST_SHARE, 1024)
