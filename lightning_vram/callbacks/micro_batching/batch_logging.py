"""``self.log`` of a batch that runs in micro-batches: one entry for the batch, or none if the attempt is dropped."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import torch
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor
from torchmetrics import Metric

from lightning_vram.core.batches.weighted_mean import weighted_mean
from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.private_names.lightning.logging import Metadata, ResultCollection, default_dtype


@dataclass
class _Entry:
    """One call of ``log`` in one micro-batch."""

    value: Any  # detached, unless its graph was asked for
    size: int
    share: float
    options: dict[str, Any]  # all other arguments by name


class BatchLogging:
    """Inside the context, ``log`` calls of one attempt are recorded; :meth:`replay` makes them, once per batch."""

    # Lightning would treat each micro-batch as a batch: the step's value would be that of the last one, and the epoch's
    # mean would weigh each of them like the whole batch. Processes exchange values (``sync_dist=True``) once per name.
    # Lightning resets the values of the epoch before when the first batch logs, in each attempt; a second time it
    # changes nothing.

    def __init__(self, results: ResultCollection) -> None:
        self._results = results
        self._entries: dict[tuple[str, str, int], list[_Entry]] = {}
        self._num_micro_batches = 0
        self._size = 1
        self._share = 1.0
        self._occurrences: Counter[tuple[str, str]] = Counter()
        self._log: Callable[..., None] = results.log
        self._patch: Shadow | None = None

    def __enter__(self) -> Self:
        self._patch = Shadow(self._results, "log", instead(self._record))
        return self

    def __exit__(self, *error: object) -> None:
        assert self._patch is not None
        self._patch.remove()

    def start_micro_batch(self, size: int, share: float) -> None:
        """Call before each micro-batch. ``share`` is its weight in means, ``size`` where all shares are 0."""
        self._num_micro_batches += 1
        self._size, self._share = size, share
        self._occurrences.clear()

    def replay(self) -> None:
        """Log the batch, once. A name counts over the micro-batches that logged it."""
        entries, self._entries = self._entries, {}
        for (fx, name, _), calls in entries.items():
            value, options = calls[0].value, calls[0].options
            if self._num_micro_batches > 1 and isinstance(value, Tensor):
                value, options = _combine(fx, name, calls)
            self._log(fx, name, value, **options)

    def _record(self, fx: str, name: str, value: Tensor | Metric, **options: Any) -> None:
        occurrence = self._occurrences[fx, name]
        self._occurrences[fx, name] += 1
        saved = value if options.get("enable_graph") else recursive_detach(value)
        self._entries.setdefault((fx, name, occurrence), []).append(_Entry(saved, self._size, self._share, options))


def _combine(fx: str, name: str, calls: Sequence[_Entry]) -> tuple[Tensor, dict[str, Any]]:
    options = dict(calls[0].options)
    batch_sizes: list[Any] = [call.options.get("batch_size") for call in calls]
    weights = [call.share for call in calls]
    if set(batch_sizes) == {sum(call.size for call in calls)}:
        pass  # a constant of the module: the size of the whole batch, which it is
    elif None not in batch_sizes:
        if batch_sizes != [call.size for call in calls]:  # else it says nothing new, and the share knows of tokens
            weights = batch_sizes
        options["batch_size"] = sum(batch_sizes)
    values: list[Tensor] = [call.value for call in calls]
    meta = Metadata(fx, name, reduce_fx=options.get("reduce_fx", torch.mean))  # knows all ways to name a reduction
    if meta.is_mean_reduction:
        sizes = [call.size for call in calls]
        floats = torch.float32, torch.float64  # Lightning converts others
        values = [value if value.dtype in floats else value.to(default_dtype()) for value in values]
        return weighted_mean(values, weights, sizes), options
    if meta.is_sum_reduction:
        return reduce(torch.add, [value.long() if value.dtype is torch.bool else value for value in values]), options
    return reduce(torch.maximum if meta.is_max_reduction else torch.minimum, values), options
