"""What plans have to show: figures of all results, by item."""

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.benchmarks.gpu_day.plans import KEYS
from tests.benchmarks.suites.plan import AT_FULL, FITS, FULL, PEAK, PLAIN, SINGLES, name_of

Rows = dict[str, dict[str, Any]]
SECONDS = "seconds_of_first"


def _plans(rows: Rows) -> list[dict[str, Any]]:
    return [row for name, row in rows.items() if name.startswith("plan, ") and PEAK in row]


def _most_of_budget(rows: Rows) -> float:
    return max(float(row[PEAK] / row["budget_bytes"]) for row in _plans(rows))


def _largest_error(rows: Rows) -> float:
    return max(abs(float(row[PEAK] / row["predicted_bytes"] - 1)) for row in _plans(rows))


def _of_best_single(rows: Rows) -> float:
    """The slowest plan, of the fastest single remedy that fits the same budget."""
    ratios = []
    for plan in _plans(rows):
        singles = [rows[name] for name in (PLAIN, *SINGLES) if PEAK in rows.get(name, {})]
        fitting = [single[SECONDS] for single in singles if single[PEAK] <= plan["budget_bytes"]]
        ratios += [plan[SECONDS] / min(fitting)] if fitting else []
    return max(ratios)


def _figure(reduce: Callable[[Rows], float], item: str, found: dict[str, Any]) -> float:
    return reduce({row["name"]: row for row in found[item]["rows"]})


_FIGURES: tuple[tuple[str, Callable[[Rows], float], float], ...] = (
    ("highest peak of plans, of the budget", _most_of_budget, 1.0),
    ("worst error of predicted peaks", _largest_error, 0.01),
    (
        "step time at full checkpointing's peak, of full checkpointing",
        lambda rows: float(rows[AT_FULL][SECONDS] / rows[FULL][SECONDS]),
        0.95,
    ),
    ("step time of plans, of the best single remedy that fits", _of_best_single, 1.02),
    ("step time where the run fits, of plain", lambda rows: float(rows[FITS][SECONDS]), 1.005),
    ("step time at half of the peak, of plain", lambda rows: float(rows[name_of(0.5)][SECONDS]), 1.15),
)
PLAN_FIGURES = tuple(
    (f"plan.{key}", text, partial(_figure, reduce, f"plan.{key}"), bound)
    for key in KEYS
    for text, reduce, bound in _FIGURES
)
