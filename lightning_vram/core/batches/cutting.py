"""Cut a batch by the user's function, or along ``batch_dim``."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.batches.leaves import count_rows, is_array
from lightning_vram.core.batches.path import (
    BatchPath,
    BatchSplitError,
    SharedKeys,
    SplitArgumentError,
    is_plain,
    iterate,
)
from lightning_vram.core.batches.sizing import WAY_OUT
from lightning_vram.core.batches.splitting import BatchSplitter, describe_all
from lightning_vram.core.batches.structure import refresh, take_apart
from lightning_vram.memory.device.out_of_memory import is_out_of_memory

_SEQUENCE_DIMS = (2, 3)  # [T, B] of tokens, [T, B, D]
SplitFunction = Callable[[Any, int], Sequence[Any]]


@dataclass(frozen=True)
class BatchFacts:
    """The size of a batch, by which micro-batch sizes are chosen."""

    num_samples: int
    num_elements: int  # of everything that has one entry per sample
    shape: str  # equal for batches that cost the same
    why_whole: str | None = None  # why it cannot be cut, so that it counts as one sample

    def elements_of(self, size: int) -> int:
        """Elements of a micro-batch of ``size`` samples."""
        return math.ceil(self.num_elements * min(size, self.num_samples) / max(1, self.num_samples))


class BatchCutter:
    """Cuts batches into views of their tensors.

    ``split(batch, size)`` returns micro-batches of ``size`` samples, the last one with the remainder; for size 1 it
    must return as many as there are samples. Tensors with too few dimensions for ``batch_dim`` are cut along their
    first. ``time_first`` names a layer that takes time before samples: batches that do not show where their samples are
    cannot be cut then.
    """

    def __init__(
        self,
        shared_keys: Sequence[str] = (),
        split: SplitFunction | None = None,
        *,
        batch_dim: int = 0,
        time_first: str | None = None,
        has_all_keys: bool = True,
    ) -> None:
        self._splitter = BatchSplitter(shared_keys, has_all_keys=has_all_keys)
        self._shared = SharedKeys(shared_keys)
        self._split = split
        self.batch_dim = batch_dim
        self._time_first = time_first if split is None else None

    def measure(self, batch: Any) -> BatchFacts:
        """Measure a batch; ``BatchSplitError`` if it cannot be split."""
        moved = self._move(batch, self.batch_dim, 0)
        num_samples = self._count(moved) if self._split is None else len(self._split(batch, 1))
        if num_samples < 1:
            raise SplitArgumentError(f"split_batch(batch, 1) returned no micro-batch for a {type(batch).__name__}.")
        if self._time_first is not None and not self._shows_samples(batch, num_samples):
            raise BatchSplitError(
                f"The module's layer {self._time_first!r} has batch_first=False, so dimension 0 of the batch may be "
                f"time ({describe_all(batch)}). Pass batch_dim=1 to MicroBatching if it is, batch_dim=0 if it is not, "
                "or split=."
            )
        if self.batch_dim and self._split is None:
            self._refuse_samples_first(batch, num_samples)
        num_elements = max(num_samples, self._splitter.elements(moved))
        return BatchFacts(num_samples, num_elements, f"{num_samples} of {self._splitter.shape_key(batch)}")

    def _count(self, moved: Any) -> int:
        try:
            return self._splitter.batch_size(moved)
        except BatchSplitError as error:
            if not self.batch_dim:
                raise
            raise type(error)(f"{error} Shapes are shown with dimension {self.batch_dim} (batch_dim=) first.") from None

    def _move(self, value: Any, source: int, destination: int) -> Any:
        if source == destination:
            return value
        try:
            return _move_dim(value, source, destination)
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            raise BatchSplitError(f"batch_dim= cannot rebuild a micro-batch: {error} Please {WAY_OUT}.") from error

    def _shows_samples(self, batch: Any, num_samples: int) -> bool:
        """Whether something has an entry for each sample that has no time: labels, images, a list of texts."""
        for _, value in iterate(batch, BatchPath(), self._shared):
            parts = take_apart(value)
            is_list = (
                parts is not None and parts.is_list and len(parts.values) == num_samples and is_plain(parts.values)
            )
            if is_list or (count_rows(value) == num_samples and getattr(value, "ndim", 0) not in _SEQUENCE_DIMS):
                return True
        return False

    def _refuse_samples_first(self, batch: Any, num_samples: int) -> None:
        """Refuse what has its samples in dimension 0, and something else in ``batch_dim``: targets ``[B, 1]``."""
        for path, value in iterate(batch, BatchPath(), self._shared):
            sizes: Sequence[int] = getattr(value, "shape", ())
            is_known = count_rows(value) is not None and len(sizes) > self.batch_dim
            if is_known and sizes[self.batch_dim] != num_samples == sizes[0]:
                raise BatchSplitError(
                    f"{path.code} has {num_samples} samples in dimension 0 and not in batch_dim={self.batch_dim} "
                    f"({describe_all(value)}). To split it, {WAY_OUT}."
                )

    def measure_or_keep_whole(self, batch: Any) -> BatchFacts:
        """As :meth:`measure`, but a batch that cannot be cut is one sample, unless the arguments are wrong."""
        try:
            return self.measure(batch)
        except SplitArgumentError:
            raise
        except BatchSplitError as error:
            num_elements = max(1, self._splitter.elements(batch))
            return BatchFacts(1, num_elements, f"whole {self._splitter.shape_key(batch)}", why_whole=str(error))

    def cut(self, batch: Any, facts: BatchFacts, size: int) -> list[tuple[Any, int]]:
        """Cut into the fewest micro-batches of at most ``size`` samples, as equal as possible; with their sizes."""
        if facts.why_whole is not None:
            return [(refresh(batch), 1)]
        num_samples = facts.num_samples
        count = -(-num_samples // size)
        if self._split is None:
            # A last one of a single sample would be one that batch norms refuse.
            sizes = [num_samples // count + (number < num_samples % count) for number in range(count)]
            parts = self._splitter.split(self._move(batch, self.batch_dim, 0), sizes)
            return list(zip([self._move(part, 0, self.batch_dim) for part in parts], sizes, strict=True))
        size = min(size, num_samples)
        sizes = [size] * (num_samples // size) + [num_samples % size] * (num_samples % size > 0)
        parts = list(self._split(batch, size))
        if len(parts) != len(sizes):
            raise BatchSplitError(
                f"split_batch(batch, {size}) returned {len(parts)} micro-batches for {num_samples} samples, "
                f"expected {len(sizes)}: {size} samples each, the last one with the remainder."
            )
        return list(zip(parts, sizes, strict=True))


def find_time_first(module: nn.Module) -> str | None:
    """Return the name of the first recurrent layer or attention in ``module`` that has ``batch_first=False``."""
    layers = (
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and not layer.batch_first
    )
    return next(layers, None)


def _move_dim(value: Any, source: int, destination: int) -> Any:
    """Move a dimension of all tensors and arrays that have it: to the front as views, back contiguous."""
    has_dim = getattr(value, "ndim", 0) > max(source, destination)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        moved = value.movedim(source, destination) if has_dim else value
        return moved if destination == 0 else moved.contiguous()
    if is_array(value):
        numpy = sys.modules["numpy"]
        moved = numpy.moveaxis(value, source, destination) if has_dim else value
        return moved if destination == 0 else numpy.ascontiguousarray(moved)
    parts = take_apart(value)
    return value if parts is None else parts.build([_move_dim(part, source, destination) for part in parts.values])
