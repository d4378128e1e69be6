"""What the figures have to be, and a table of what they are."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from tests.benchmarks.gpu_day import results
from tests.benchmarks.gpu_day.device_tests import CHUNKS
from tests.benchmarks.gpu_day.fits import IDLE, LIGHTNING_2, PLUGINS
from tests.benchmarks.gpu_day.plan_goals import PLAN_FIGURES
from tests.benchmarks.gpu_day.results import Result
from tests.benchmarks.gpu_day.running_out import EXPANDING
from tests.benchmarks.gpu_day.speed import BESIDE, BY_HAND, CHECKPOINTED, FUSED, MATMULS, OFFLOADED, SELECTIVE

NOTHING_CHOSEN = 5  # exit code of pytest: no test of these folders needs the device
Figure = Callable[[dict[str, Result]], float]


@dataclass(frozen=True)
class Goal:
    """A bound of one figure.

    Args:
        item: Which has to be there, and is at fault.
        text: What the figure is.
        figure: Of all results, by item; ``LookupError`` if something of it is not there.
        bound: The figure is at most that, or at least where ``is_at_least``.
    """

    item: str
    text: str
    figure: Figure
    bound: float
    is_at_least: bool = False

    def is_met(self, figure: float) -> bool:
        """Whether ``figure`` is good enough; NaN is not."""
        return figure >= self.bound if self.is_at_least else figure <= self.bound


def _row(found: dict[str, Result], item: str, name: str) -> Result:
    return next((row for row in found[item]["rows"] if row["name"] == name), {})


def _value(item: str, name: str, key: str) -> Figure:
    return lambda found: _row(found, item, name)[key]


def _ratio(item: str, name: str, other: str, key: str, other_item: str | None = None) -> Figure:
    return lambda found: _row(found, item, name)[key] / _row(found, other_item or item, other)[key]


def _unmet(item: str) -> Figure:
    """Rows of a smoke item that are not as they should be, or have an error."""
    return lambda found: sum(not row.get("is_met", False) for row in found[item]["rows"])


def _failed_tests(item: str) -> Figure:
    """Tests that failed; infinite where pytest itself did not come to its end, or all were skipped."""

    def figure(found: dict[str, Result]) -> float:
        result = found[item]
        counts, is_over = result["counts"], result["exit_code"] in (0, 1, NOTHING_CHOSEN)
        is_idle = counts["skipped"] > 0 and counts["passed"] + counts["failed"] == 0
        return counts["failed"] if is_over and not is_idle else float("inf")

    return figure


def _error(key: str, reduce: Callable[[list[float]], float]) -> Figure:
    """Of all cases that were estimated: how far from what the allocator had, as a part of that."""
    groups = ("estimate.", "peaks.")
    return lambda found: reduce(
        [abs(row[key]) for item in found if item.startswith(groups) for row in found[item]["rows"] if key in row]
    )


STEP = "seconds_per_step"
SECONDS, KEPT, PEAK = "seconds_of_first", "kept_bytes", "max_memory_allocated_bytes"
_OPTIMIZER, _TOKENS = "fsdp_offload, optimizer", "tokens_per_second"
GOALS = (
    *(
        Goal(f"smoke.{name}", "parts that differ from plain, or fail", _unmet(f"smoke.{name}"), 0)
        for name in ("callbacks", "strategies", "precisions", "parameters", "combinations", "images")
    ),
    *(Goal(f"tests.{name}", "tests that fail", _failed_tests(f"tests.{name}"), 0) for name in (*CHUNKS, "rest")),
    *(
        goal
        for item in ("speed.resnet50_bf16.fusion", "speed.resnet50_fp32.fusion")
        for goal in (
            Goal(item, "kept bytes, of plain", _ratio(item, FUSED, "plain", KEPT), 0.55),
            Goal(item, "step time, of plain", _value(item, FUSED, SECONDS), 1.05),
        )
    ),
    *(
        Goal(item, "step time, of torch's by hand", _value(item, name, SECONDS), 1.0)
        for key in ("gpt2_xl", "gpt2_small")
        for item, name in (
            (f"speed.{key}.checkpointing", CHECKPOINTED),
            (f"speed.{key}.matmuls", MATMULS),
        )
    ),
    *(
        goal
        for item in ("speed.gpt2_xl.offload_beside", "speed.gpt2_small.offload_beside")
        for goal in (
            Goal(item, "step time, of checkpointed", _value(item, BESIDE, SECONDS), 1.01),
            Goal(item, "peak, of checkpointed", _ratio(item, BESIDE, CHECKPOINTED, PEAK), 1.0),
        )
    ),
    *(
        goal
        for item in ("speed.gpt2_xl.offload", "speed.gpt2_small.offload")
        for goal in (Goal(item, "peak, of plain", _ratio(item, OFFLOADED, "plain", PEAK), 0.42),)
    ),
    *(
        Goal(f"speed.{key}", f"step time of {name}, of {other}", _ratio(f"speed.{key}", name, other, STEP), bound)
        for key in ("gpt2_xl", "gpt_wide", "gpt2_small", "resnet50_bf16")
        for name, other, bound in (
            (CHECKPOINTED, BY_HAND, 1.0),
            (FUSED, "plain", 1.05),
            *(() if key == "resnet50_bf16" else ((MATMULS, SELECTIVE, 1.0), (BESIDE, CHECKPOINTED, 1.01))),
        )
    ),
    Goal(
        "sharded.xl_16k.lightning_fsdp2",
        "seconds per step of fsdp_offload, of Lightning's with CPUOffloadPolicy",
        _ratio("sharded.xl_16k.optimizer", _OPTIMIZER, LIGHTNING_2, STEP, "sharded.xl_16k.lightning_fsdp2"),
        1.0,
    ),
    Goal("quick_tests.all", "device tests that fail", _failed_tests("quick_tests.all"), 0),
    Goal(
        "running_out.lengths",
        "reserved, of allocated, where lengths vary",
        _value("running_out.lengths", EXPANDING, "reserved_of_allocated"),
        1.1,
    ),
    *(
        Goal(item, f"step time of {name}, of Lightning's", _value(item, name, SECONDS), 1.02)
        for item in ("fits.precision.gpt2_small", "fits.precision.resnet50")
        for name in PLUGINS[1:]
    ),
    *(Goal(item, text, figure, bound) for item, text, figure, bound in PLAN_FIGURES),
    Goal(
        "fits.idle.gpt2_small",
        f"step time of {IDLE}, of plain",
        _value("fits.idle.gpt2_small", IDLE, SECONDS),
        1.005,
    ),
    *(
        Goal("estimate.allocator", f"{text} error of estimated {name} bytes", _error(f"{name}_error", reduce), bound)
        for text, reduce, name, bound in (
            ("mean", fmean, "allocated", 0.02),
            ("worst", max, "allocated", 0.05),
            ("mean", fmean, "reserved", 0.03),
            ("worst", max, "reserved", 0.08),
        )
    ),
    *(
        Goal(
            f"sharded.{key}.optimizer",
            "tokens per second, of plain",
            _ratio(f"sharded.{key}.optimizer", _OPTIMIZER, "plain", _TOKENS, f"sharded.{key}.plain"),
            bound,
            is_at_least=True,
        )
        for key, bound in (("xl_16k", 0.95), ("xl_8k_clip", 0.60))
    ),
)


def figure_of(goal: Goal, found: dict[str, Result]) -> float | None:
    """Return the figure, or ``None`` where it has not been measured."""
    try:
        return goal.figure(found)
    except (LookupError, TypeError, ValueError, ZeroDivisionError):  # no row has it
        return None


def print_summary(folder: Path) -> None:
    """Print each goal with its figure, and what went wrong."""
    found = results.read_all(folder)
    table = Table("item", "figure", "is", "goal", "met")
    for goal in GOALS:
        figure = figure_of(goal, found)
        if figure is not None or goal.item in found:
            bound = f"{'>=' if goal.is_at_least else '<='} {goal.bound:g}"
            text, met = ("-", "not measured") if figure is None else (f"{figure:.4g}", _yes(goal.is_met(figure)))
            table.add_row(goal.item, goal.text, text, bound, met)
    console = Console(width=140)
    console.print(table)
    for name, result in found.items():
        if "error" in result or result["status"] not in ("done", "killed"):
            console.print(f"{name}: {result['status']}: {result.get('error', '')}", markup=False)
        for row in result["rows"]:
            if "error" in row:
                console.print(f"{name}, {row['name']}: {row['error']}", markup=False)
            elif row.get("is_met") is False:
                console.print(f"{name}, {row['name']}: differs by {row['relative_difference']:.1e}", markup=False)


def _yes(is_met: bool) -> str:
    return "yes" if is_met else "NO"
