"""What would help after OOM: each feature alone, the best combination, or a smaller evaluation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl

from lightning_vram.estimation.batches import batch_size_of, with_batch_size
from lightning_vram.estimation.estimate import Progress, needed_bytes
from lightning_vram.estimation.traced_fit import FitRun, trace_fit
from lightning_vram.memory.estimate.workspaces import workspaces_of
from lightning_vram.planner.plan import TracedSteps
from lightning_vram.planner.remedies import CHECKPOINTING, IN_PARTS, TOKEN_TILING, Remedies
from lightning_vram.planner.scheme import Exactness, Measured, Part, Scheme, Workload, find_measured
from lightning_vram.planner.search import search


def measure_singles(steps: TracedSteps, exact: Remedies, every: Remedies, budget_bytes: int | None) -> None:
    """Search for the fastest exact scheme for a budget, if any, and trace each part alone.

    The best part comes before the search, which may take all the time. ``steps.tried`` has the results, the baseline
    first, also after an interrupt.
    """

    def measure(scheme: Scheme) -> Measured | None:
        return find_measured(scheme, steps.tried) or steps(scheme)

    measure(Scheme())
    singles = _singles(steps, every)
    for scheme in singles[:1]:
        measure(scheme)
    if budget_bytes is not None:
        search(measure, Workload(budget_bytes, steps.batch_size, steps.transfer_bytes), exact)
    for scheme in singles[1:]:
        measure(scheme)


def _singles(steps: TracedSteps, remedies: Remedies) -> list[Scheme]:
    """Return each part alone: first those for the larger share of the peak, cheap to trace first."""
    parts = [CHECKPOINTING] if remedies.checkpoints else []
    if remedies.cuts and steps.batch_size > 1:
        parts.append(replace(IN_PARTS, init_args={"size": -(-steps.batch_size // 2)}))
    parts += [*remedies.free, *([TOKEN_TILING] if remedies.tiles else []), *remedies.singles]
    activations = [Scheme((part,)) for part in parts]
    states = [scheme for scheme in remedies.states if len(scheme.parts) == 1]
    baseline = steps.tried[0]
    return states + activations if baseline.states_bytes > baseline.activation_bytes else activations + states


def as_code(parts: Sequence[Part]) -> str:
    """Return arguments of a Trainer in Python.

    Example:
        >>> as_code([Part("lightning_vram.MicroBatching", {"size": 4})])
        'callbacks=[MicroBatching(size=4)]'
    """
    places: dict[str, list[str]] = {}
    for part in parts:
        arguments = ", ".join(f"{name}={value!r}" for name, value in part.init_args.items())
        places.setdefault(part.place, []).append(f"{part.name}({arguments})")
    texts = [f"{name}=None" for part in parts for name in part.replaces]
    texts += [
        f"{place}={made[0]}" if place == "strategy" else f"{place}=[{', '.join(made)}]"
        for place, made in places.items()
    ]
    return ", ".join(texts)


def results_of(exactness: Exactness) -> str:
    """Return how results compare with the baseline."""
    return ("exact", "lossless", "approximate")[exactness]


@dataclass(frozen=True)
class LeanerEvaluation:
    """A variant of an evaluation."""

    code: str  # to paste; empty for the baseline
    needed_bytes: int  # device memory
    results: str  # compared with the baseline


def measure_evaluation(
    module: pl.LightningModule,
    batch: Any,
    run: FitRun,
    on_progress: Progress,
    *,
    keeps_precision: bool,
    is_late: Callable[[], bool],
) -> Iterator[LeanerEvaluation | None]:
    """Trace an evaluation batch: baseline, half of it, and 16 bits if allowed; ``None``: skipped, as ``is_late()``."""
    variants, size = [("", batch, run, "exact")], batch_size_of(batch) or 0
    if size > 1:
        half = -(-size // 2)
        variants.append((f"DataLoader(..., batch_size={half})", with_batch_size(batch, size, half), run, "lossless"))
    if not keeps_precision and run.trainer_arguments.get("precision") == "32-true":
        rounded = replace(run, trainer_arguments={**run.trainer_arguments, "precision": "bf16-true"})
        variants.append(('precision="bf16-true"', batch, rounded, "approximate"))
    for number, (code, its_batch, its_run, results) in enumerate(variants):
        if code and is_late():
            yield None
            continue
        on_progress(f"tracing {code or 'baseline'}", number / len(variants))
        try:
            traced = trace_fit(module, its_batch, its_run)
            num_bytes = needed_bytes(traced, None if run.card is None else workspaces_of(run.card))
        except Exception:
            if its_run is run:
                raise
            continue  # a step with mixed dtypes, or an operator without 16 bits
        yield LeanerEvaluation(code, num_bytes, results)
