"""Try shares, one per training step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_vram.memory.tracking.storages import iterate_tensors
from lightning_vram.private_names.torch.partitioner import activation_share
from lightning_vram.techniques.activation_checkpointing.compiled_budget.kept_bytes import KeptBytes
from lightning_vram.techniques.activation_checkpointing.compiled_budget.search import ShareSearch


class CompiledBudget:
    """Sets the share for one fit."""

    def __init__(self, model: nn.Module, budget_bytes: int) -> None:
        self._model = model  # the whole model; all its compiled parts share one setting
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
        kept = KeptBytes(alive)
        with kept.counting():
            yield
        self.search.note(share, _largest_of_ranks(kept.peak_bytes))
        self.is_done = self.search.next_share() is None

    def remove(self) -> None:
        """Put the setting back; what was compiled with it is compiled again. Calling it again does nothing."""
        self._setting.close()
        if self._share is not None:
            torch.compiler.reset()
        self._share = None


def _largest_of_ranks(num_bytes: int) -> int:
    """Ranks have to recompute the same layers. A collective, where there are several ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return num_bytes
    everybodys: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybodys, num_bytes)
    return max(everybodys)
