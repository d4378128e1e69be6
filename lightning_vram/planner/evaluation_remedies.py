"""What makes a batch of an evaluation leaner: there is no backward, so what parts save is not needed there."""

from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl

from lightning_vram.estimation.batches import batch_size_of, with_batch_size
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
    module: pl.LightningModule, batch: Any, run: FitRun, *, keeps_precision: bool
) -> list[LeanerEvaluation]:
    """Run a batch of an evaluation on fake tensors: first as it is, then in halves, and in 16 bits if it may be."""
    found = [LeanerEvaluation("", _needed_bytes(module, batch, run), "exact")]
    size = batch_size_of(batch) or 0
    if size > 1:
        half = -(-size // 2)
        num_bytes = _needed_bytes(module, with_batch_size(batch, size, half), run)
        found.append(LeanerEvaluation(f"DataLoader(..., batch_size={half})", num_bytes, "lossless"))
    if not keeps_precision and run.trainer_arguments.get("precision") == _FULL_PRECISION:
        arguments = {**run.trainer_arguments, "precision": "bf16-true"}
        try:
            num_bytes = _needed_bytes(module, batch, replace(run, trainer_arguments=arguments))
        except Exception:  # a step that mixes formats, or an operator that has none in 16 bits
            return found
        found.append(LeanerEvaluation('precision="bf16-true"', num_bytes, "approximate"))
    return found


def _needed_bytes(module: pl.LightningModule, batch: Any, run: FitRun) -> int:
    return needed_bytes(trace_fit(module, batch, run), None if run.card is None else workspaces_of(run.card))
