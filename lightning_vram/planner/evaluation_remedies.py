"""Evaluation variants that need less memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl

from lightning_vram.estimation.batches import batch_size_of, with_batch_size
from lightning_vram.estimation.estimate import Progress
from lightning_vram.estimation.stages import needed_bytes
from lightning_vram.estimation.traced_fit import FitRun, trace_fit
from lightning_vram.memory.estimate.workspaces import workspaces_of

_FULL_PRECISION = "32-true"


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
    if not keeps_precision and run.trainer_arguments.get("precision") == _FULL_PRECISION:
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
