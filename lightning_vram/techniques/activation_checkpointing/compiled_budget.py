"""Meet a byte budget for activations in compiled code, whose compiler takes a share.

Each training step at the start of a run tries one share. May import: activation_checkpointing, core, memory.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.ranks import gather_objects
from lightning_vram.memory.storages import ByStorage, iterate_storages, iterate_tensors
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.dispatcher import LEAST_SHARE, activation_share
from lightning_vram.private_names.torch import storage_key

CLOSE_ENOUGH = 0.97
"""A share that keeps this much of the budget ends the search."""

MAX_MEASUREMENTS = 7
_AIM = (1 + CLOSE_ENOUGH) / 2
_FIRST_STEP = 0.25
_LEAST_PART = 0.2  # of the interval that is left


class CompiledBudgetError(ValueError):
    """Nothing fits."""


class ShareSearch:
    """Searches for the largest share that saves no more than a budget, with as few measurements as possible.

    Saved bytes do not follow the share (https://github.com/pytorch/pytorch/issues/197838): only measured points count.
    The search starts from below, so that steps that try a share seldom exceed the budget.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.kept_bytes: dict[float, int] = {}

    @property
    def best(self) -> float:
        """The largest share that was measured to fit."""
        return max(share for share, kept in self.kept_bytes.items() if kept <= self._budget_bytes)

    @property
    def next_above(self) -> float | None:
        """The least share above it that was measured, if any: it does not fit."""
        return min((share for share in self.kept_bytes if share > self.best), default=None)

    @property
    def is_close(self) -> bool:
        """Whether the best share keeps nearly the budget, or all that there is to keep."""
        return self.best == 1 or self.kept_bytes[self.best] >= CLOSE_ENOUGH * self._budget_bytes

    def note(self, share: float, kept_bytes: int) -> None:
        """Note a measurement; raises ``CompiledBudgetError`` if the least share does not fit."""
        self.kept_bytes[share] = kept_bytes
        if share == LEAST_SHARE and kept_bytes > self._budget_bytes:
            raise CompiledBudgetError(
                f"budget={format_bytes(self._budget_bytes)} is below the minimum of {format_bytes(kept_bytes)}, which "
                "is saved for backward when the compiler recomputes all it can. Increase it, or use smaller batches."
            )

    def next_share(self) -> float | None:
        """Return the next share to try; ``None`` if the search is over."""
        if not self.kept_bytes:
            return LEAST_SHARE
        best, above = self.best, self.next_above
        if self.is_close or len(self.kept_bytes) >= MAX_MEASUREMENTS:
            return None
        if above is None:
            return min(1.0, max(_FIRST_STEP, 2 * best))
        kept = self.kept_bytes[best]
        part = (_AIM * self._budget_bytes - kept) / (self.kept_bytes[above] - kept)  # along a straight line
        return best + min(max(part, _LEAST_PART), 1 - _LEAST_PART) * (above - best)


class SavedBytesCounter:
    """Counts memory that autograd saves, each storage once while it lives, except that of ``others``.

    By saved-tensor hooks: a dispatch mode would make compiled code run uncompiled.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self._others = {storage_key(storage) for tensor in others for storage, _ in iterate_storages(tensor)}
        self._alive: ByStorage[int] = ByStorage(self._free)  # their bytes
        self._num_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved inside."""
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        for storage, _ in iterate_storages(tensor):
            if storage_key(storage) not in self._others and self._alive.find_storage(storage) is None:
                self._alive.note_storage(storage, storage.nbytes())
                self._num_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        return tensor

    def _free(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


class CompiledBudget:
    """Sets the share for one fit."""

    def __init__(self, model: nn.Module, budget_bytes: int) -> None:
        self._model = model  # the whole model; all its compiled parts share one setting
        self.budget_bytes = budget_bytes
        self.search = ShareSearch(budget_bytes)
        self._setting = ExitStack()
        self._share: float | None = None
        self.is_done = False

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Run one training step on ``batch`` inside; raises ``CompiledBudgetError`` on all ranks if nothing fits."""
        share = self.search.next_share() or self.search.best
        if share != self._share:
            self._setting.close()
            self._setting.enter_context(activation_share(share))
            torch.compiler.reset()  # a share holds for what is compiled from now on; also resets recompile_limit
            self._share = share
        if self.is_done:
            yield
            return
        alive = [*self._model.parameters(), *self._model.buffers(), *iterate_tensors(batch)]
        kept = SavedBytesCounter(alive)
        with kept.counting():
            yield
        self.search.note(share, max(gather_objects(kept.peak_bytes)))  # ranks recompute the same layers
        self.is_done = self.search.next_share() is None

    def remove(self) -> None:
        """Put the setting back; what was compiled with it is compiled again. Calling it again does nothing."""
        self._setting.close()
        if self._share is not None:
            torch.compiler.reset()
        self._share = None
