"""The same fit with and without what saves memory: did it fit, is it still right, how much slower."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from lightning_vram.memory.device.measurement import Measurement
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.tables import NOT_KNOWN, add_names, add_numbers, add_peaks, format_seconds

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class FitResult:
    """What one fit left behind."""

    peak: Measurement | None = None  # of the highest training batch; None: nothing was measured
    seconds_per_batch: float | None = None  # median of untracked training batches
    weights: Mapping[str, Tensor] | None = None  # None: the fit ran out of memory


def describe_equality(one: FitResult, other: FitResult) -> str:
    """Describe whether the weights of two fits are bitwise identical, or how far apart they are."""
    if one.weights is None or other.weights is None:
        return NOT_KNOWN
    if one.weights.keys() != other.weights.keys():
        return f"no: {len(one.weights.keys() ^ other.weights.keys())} names differ"
    differing = [name for name, tensor in one.weights.items() if not torch.equal(tensor, other.weights[name])]
    if not differing:
        return "yes, bit-exact"
    apart = max(float((one.weights[n].double() - other.weights[n].double()).abs().max()) for n in differing)
    return f"no: {len(differing)} of {len(one.weights)} tensors differ, by at most {apart:.1e}"


def comparison_table(baseline: FitResult, optimized: FitResult, parts: str) -> Table:
    """Peak bytes by category, time and equality of two fits, side by side."""
    device = next((f" on {fit.peak.device}" for fit in (optimized, baseline) if fit.peak is not None), "")
    table = Table(
        title=f"Peak memory of a training step{device}: baseline and {parts}",
        title_justify="left",
        caption=f"Final weights equal: {describe_equality(baseline, optimized)}.",
        caption_justify="left",
    )
    add_names(table, "")
    add_numbers(table, "baseline", "with lightning_vram", "ratio")

    fits = (baseline, optimized)
    missing = [OUT_OF_MEMORY if fit.weights is None else NOT_KNOWN for fit in fits]

    def cells(sizes: list[int | None]) -> list[str]:
        known = [text if size is None else format_bytes(size) for text, size in zip(missing, sizes, strict=True)]
        return [*known, _ratio(*sizes)]

    add_peaks(table, [fit.peak for fit in fits], cells)
    times = baseline.seconds_per_batch, optimized.seconds_per_batch
    table.add_row("time per step", *map(format_seconds, times), _ratio(*times))
    return table


def _ratio(baseline: float | None, optimized: float | None) -> str:
    return f"{optimized / baseline:.2f}" if baseline and optimized is not None else NOT_KNOWN
