"""Release cached device memory at the switch between training and validation.

It lowers reserved memory that is fragmented, not the memory that a phase allocates at its peak.
"""

import gc
import logging
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_positive_int
from lightning_vram.callbacks.hook_points import check_trainer
from lightning_vram.memory.device.accelerators import (
    PeakWatch,
    empty_cache,
    has_cache,
    has_growing_cache,
    holds_much_more,
    read_allocator,
)
from lightning_vram.memory.units import GIB, format_bytes, parse_bytes

_MUCH_MORE = 1.5, GIB  # the driver's bytes of those in tensors, and beyond them

log = logging.getLogger(__name__)


class EmptyCache(Callback):
    """Empty the device's cache when validation starts and ends, and optionally during training. Exact.

    Cached blocks of training rarely fit validation and vice versa (fragmentation), so reserved memory can grow to the
    sum of both. All ranks empty their caches at the same batch, so that no rank waits for another. Nothing is stored in
    checkpoints. On a device without a cache, such as a CPU, nothing happens, and a message is logged.

    On Apple GPUs PyTorch keeps blocks of every batch shape until macOS swaps. There, allocated memory is also read
    before each backward and after each training batch. If the driver then holds over 1.5 times the largest value read,
    and at least 1 GiB more, the cache is emptied.

    Args:
        every_n_batches: Also empty the cache after every n-th training batch of an epoch. Counts batches, not optimizer
            steps. ``None``: around validation only.
        min_fragmentation_bytes: Empty the cache only if at least one rank has this many bytes reserved but not
            allocated, as an ``int`` or as ``"2GiB"``. ``None``: always. Costs one small reduction over the ranks each
            time.
        gc_collect: Run Python's garbage collector first, so that tensors in reference cycles are freed, too. Takes
            tenths of a second in a large program.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``every_n_batches`` is smaller than 1, or ``min_fragmentation_bytes`` is not a size.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import EmptyCache
        >>> trainer = pl.Trainer(callbacks=[EmptyCache(every_n_batches=500)], logger=False)
    """

    hears_micro_batches = True  # each of them has a peak: see MicroBatching
    _watch: PeakWatch | None = None  # of a device whose cache has no limit, in training

    def __init__(
        self,
        every_n_batches: int | None = None,
        min_fragmentation_bytes: int | str | None = None,
        *,
        gc_collect: bool = False,
    ) -> None:
        if every_n_batches is not None:
            check_positive_int("EmptyCache(every_n_batches)", every_n_batches)
        if min_fragmentation_bytes is not None:
            min_fragmentation_bytes = parse_bytes(min_fragmentation_bytes, "EmptyCache(min_fragmentation_bytes)")
        check_bool("EmptyCache(gc_collect)", gc_collect)
        self.every_n_batches = every_n_batches
        self.min_fragmentation_bytes = min_fragmentation_bytes
        self.gc_collect = gc_collect

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer("EmptyCache", trainer)
        device = trainer.strategy.root_device
        if not has_cache(device):  # not a warning: a program for a GPU, tried on a host, is right as it is
            rank_zero_info(f"EmptyCache has no effect on device '{device}': it has no cache.")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device = trainer.strategy.root_device
        self._watch = PeakWatch(device) if has_growing_cache(device) else None
        if self._watch is not None:
            self._watch.restart()

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        if self._watch is not None:  # activations are at their peak
            self._watch.read()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_batches is not None and (batch_idx + 1) % self.every_n_batches == 0:
            self._release(trainer)
        elif self._watch is not None:
            now = self._watch.read()
            if holds_much_more(now.peak_allocated_bytes, now.reserved_bytes, *_MUCH_MORE):
                self._release(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._release(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_watch"}  # a copy has no run

    def _release(self, trainer: pl.Trainer) -> None:
        device = trainer.strategy.root_device
        if not has_cache(device):
            return
        if self.gc_collect:
            gc.collect()
        if self.min_fragmentation_bytes is not None:
            is_fragmented = read_allocator(device).fragmentation_bytes >= self.min_fragmentation_bytes
            if not trainer.strategy.reduce_boolean_decision(is_fragmented, all=False):
                return
        released_bytes = empty_cache(device)
        log.debug("EmptyCache released %s at step %d.", format_bytes(released_bytes), trainer.global_step)
