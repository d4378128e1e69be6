"""Search the share of a run's compiled code step by step, each of them a training step of that run.

A share holds for what is compiled after it was set. ``torch.compiler.reset()`` makes PyTorch compile again what is
called again, all compiled code of the process, and gives back what CUDA graphs hold. It also starts the count anew that
ends in Dynamo's ``recompile_limit``.
"""

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
    """Sets the share for one fit.

    Args:
        model: The whole model; all its compiled parts share one setting.
        budget_bytes: For what a step keeps for its backward, in eager code, too.
    """

    def __init__(self, model: nn.Module, budget_bytes: int) -> None:
        self._model = model
        self._search = ShareSearch(budget_bytes)
        self._setting = ExitStack()
        self._share: float | None = None
        self.is_done = False

    @property
    def kept_bytes(self) -> dict[float, int]:
        """What was measured, by share."""
        return self._search.kept_bytes

    @property
    def best(self) -> float:
        """The share that was chosen, once :attr:`is_done`."""
        return self._search.best

    @property
    def next_above(self) -> float | None:
        """The least share above it that was tried, and kept too much; ``None`` if none was."""
        return self._search.next_above

    @property
    def is_close(self) -> bool:
        """Whether the best share keeps nearly the budget, or all that there is to keep."""
        return self._search.is_close

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Run one training step inside. Its batch is ``batch``.

        Raises:
            CompiledBudgetError: On all ranks, after the step, if nothing fits.
        """
        share = self._search.next_share() or self._search.best
        if share != self._share:
            self._compile_with(share)
        if self.is_done:
            yield
            return
        alive = [*self._model.parameters(), *self._model.buffers(), *iterate_tensors(batch)]
        kept = KeptBytes(alive)
        with kept.counting():
            yield
        self._search.note(share, _largest_of_ranks(kept.peak_bytes))
        self.is_done = self._search.next_share() is None

    def _compile_with(self, share: float) -> None:
        self._setting.close()
        self._setting.enter_context(activation_share(share))
        torch.compiler.reset()
        self._share = share

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
