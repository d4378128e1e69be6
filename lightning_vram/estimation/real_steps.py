"""Steps that look at values: a few samples on real tensors, on the host, and what follows for a whole batch."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_vram.core.batches.path import BatchSplitError
from lightning_vram.core.batches.splitting import BatchSplitter
from lightning_vram.estimation.batches import batch_size_of, map_tensors
from lightning_vram.estimation.fake_trainer import needs_ranks
from lightning_vram.estimation.limits import attempt
from lightning_vram.estimation.size_law import SizeLaw
from lightning_vram.estimation.traced_fit import STEP, FitRun, TracedFit, trace_real_fit
from lightning_vram.memory.estimate.fakes.device_module import CARD
from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.memory.tracking.timeline import Category, MemoryEvent, Phase
from lightning_vram.memory.units import format_bytes

_FEW = 2  # batch norms refuse one
_PER_WEIGHT_BYTE = 5  # the weights' copy, gradients, two moments, and what the step itself takes
_OF_THE_BATCH = (Category.INPUTS, Category.ACTIVATIONS, Category.TEMPORARIES)


class RealSteps:
    """Real steps of a module, on the host, with few samples of a batch.

    Args:
        module: Is copied, weights and all.
        batch: Its values count, but those of tensors on the ``meta`` device, which are made up.
        run: How, on one device.
        reason: What the step on fake tensors has raised.

    Raises:
        ValueError: If no real step can be run: its message has the reason.
        Exception: What the module raises in its real step.
    """

    def __init__(self, module: pl.LightningModule, batch: Any, run: FitRun, reason: Exception) -> None:
        self._why = _name_of(reason)
        self._check(module, run)
        self._device = str(CARD) if run.card is not None else "cpu"
        real = map_tensors(batch, _with_values)
        parts = _parts_of(real)
        runs, _ = attempt(lambda: {size: trace_real_fit(module, part, run) for size, part in parts.items()})
        self._runs = runs or {batch_size_of(real) or 1: trace_real_fit(module, real, run)}  # it takes no other size

    def predict(self, size: int) -> TracedFit:
        """Return the run of a batch of ``size`` samples; of the whole batch, if it could not be cut."""
        if len(self._runs) == 1:
            return self._noted(next(iter(self._runs.values())), "the batch")
        sizes = " and ".join(map(str, self._runs))
        predicted = self._by_law(size)
        if predicted is not None:
            return self._noted(predicted, f"{sizes} samples, from which the rest follows by a linear law")
        return self._noted(
            _scaled(self._runs, size),
            f"{sizes} samples, which did not do the same: what grows with the batch is scaled by their peaks, and may "
            "be off by some 10 %",
        )

    @property
    def has_law(self) -> bool:
        """Whether anything follows for batches of other sizes."""
        return len(self._runs) > 1

    def _check(self, module: pl.LightningModule, run: FitRun) -> None:
        weights = [*module.parameters(), *module.buffers()]
        why = f"The step looks at values ({self._why}), so it must run on real tensors"
        if any(tensor.is_meta for tensor in weights):
            raise ValueError(f"{why}: give it a module whose weights are not on the meta device.")
        if needs_ranks(run.trainer_arguments) or run.num_ranks > 1:
            raise ValueError(f"{why}, and those of several processes cannot be. Estimate it for one device.")
        needed_bytes = _PER_WEIGHT_BYTE * sum(tensor.nbytes for tensor in weights)
        there_bytes = available_host_bytes()
        if there_bytes is not None and needed_bytes > there_bytes:
            has, needs = format_bytes(there_bytes), format_bytes(needed_bytes)
            raise ValueError(f"{why}: that takes about {needs} of host memory, and there are {has}.")

    def _by_law(self, size: int) -> TracedFit | None:
        try:
            predicted = SizeLaw(self._runs).predict(size)
        except ValueError:
            return None
        events = next(iter(self._runs.values())).timeline.events
        columns = zip(predicted.timeline.events, events, strict=True)
        return predicted if all(one.change_bytes * other.change_bytes > 0 for one, other in columns) else None

    def _noted(self, traced: TracedFit, how: str) -> TracedFit:
        """Put what lay on the host on the device."""
        allocations = tuple(replace(one, device=self._device) for one in traced.timeline.allocations)
        timeline = replace(traced.timeline, allocations=allocations, device=self._device)
        note = f"The step looks at values ({self._why}): real steps were run on the CPU, with {how}."
        return replace(traced, timeline=timeline, notes=(*traced.notes, note))


def _parts_of(batch: Any) -> dict[int, Any]:
    """Return the first samples of a batch, by their number: all of them if there are few, or nobody can count them."""
    size = batch_size_of(batch)
    if size is None or size <= 2 * _FEW:
        return {size or 1: batch}
    try:
        return {few: BatchSplitter().split(batch, [few, size - few])[0] for few in (_FEW, 2 * _FEW)}
    except BatchSplitError:
        return {size: batch}


def _with_values(tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.ones(tensor.shape, dtype=tensor.dtype)


def _scaled(runs: Mapping[int, TracedFit], size: int) -> TracedFit:
    """Scale what grows with the batch in the largest run, such that its peak is on the line through those of all."""
    (few, first), (more, second) = sorted(runs.items())
    low_bytes, high_bytes = (run.stage(STEP).peak_bytes for run in (first, second))
    peak_bytes = high_bytes + (high_bytes - low_bytes) * (size - more) / (more - few)
    timeline = second.timeline
    by_category = second.stage(STEP).peak_by_category
    growing_bytes = sum(by_category[category] for category in _OF_THE_BATCH)
    factor = max(0.0, (peak_bytes - high_bytes + growing_bytes) / max(1, growing_bytes))

    def scale(event: MemoryEvent) -> MemoryEvent:
        allocation = timeline.allocations[event.allocation]
        if allocation.category not in _OF_THE_BATCH or allocation.phase is Phase.OPTIMIZER_STEP:
            return event
        return replace(event, change_bytes=round(event.change_bytes * factor))

    return replace(second, timeline=replace(timeline, events=tuple(map(scale, timeline.events))))


def _name_of(reason: Exception) -> str:
    """Name the operator, which is what torch's own errors have for a message, or the first line of others."""
    return next(iter(str(reason).splitlines()), type(reason).__name__)
