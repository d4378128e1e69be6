"""What makes a batch of an evaluation leaner: there is no backward, so what parts save is not needed there."""

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
    """A way to evaluate."""

    code: str  # to paste; empty for the run as it is
    needed_bytes: int  # of the device
    results: str  # how they compare with those of the run as it is


def measure_evaluation(
    module: pl.LightningModule,
    batch: Any,
    run: FitRun,
    on_progress: Progress,
    *,
    keeps_precision: bool,
    is_late: Callable[[], bool],
) -> Iterator[LeanerEvaluation | None]:
    """Run a batch of an evaluation on fake tensors: first as it is, then in halves, and in 16 bits if it may be.

    ``None`` stands for what is left out because ``is_late()``.
    """
    ways, size = [("", batch, run, "exact")], batch_size_of(batch) or 0
    if size > 1:
        half = -(-size // 2)
        ways.append((f"DataLoader(..., batch_size={half})", with_batch_size(batch, size, half), run, "lossless"))
    if not keeps_precision and run.trainer_arguments.get("precision") == _FULL_PRECISION:
        rounded = replace(run, trainer_arguments={**run.trainer_arguments, "precision": "bf16-true"})
        ways.append(('precision="bf16-true"', batch, rounded, "approximate"))
    for number, (code, its_batch, its_run, results) in enumerate(ways):
        if code and is_late():
            yield None
            continue
        on_progress(f"tracing {code or 'baseline'}", number / len(ways))
        try:
            num_bytes = _needed_bytes(module, its_batch, its_run)
        except Exception:
            if its_run is run:
                raise
            continue  # a step that mixes formats, or an operator that has none in 16 bits
        yield LeanerEvaluation(code, num_bytes, results)


def _needed_bytes(module: pl.LightningModule, batch: Any, run: FitRun) -> int:
    return needed_bytes(trace_fit(module, batch, run), None if run.card is None else workspaces_of(run.card))
