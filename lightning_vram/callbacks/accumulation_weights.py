"""The weighted mean over the micro-batches of a window, on all ranks, without looking ahead.

Wanted is ``sum(w * gradient) / sum(w)`` over all micro-batches of all ranks. Losses are multiplied by ``w`` as they
come, gradients are divided by the sum when it is known: before the optimizer step, by one reduction of one number.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_vram.techniques.batch_weights import BatchWeight


class AccumulationWeights:
    """Weights of one window after the other. They stay on the device, which is never waited for.

    Args:
        weigh: From a batch to its weight.
        trainer: That runs.
    """

    def __init__(self, weigh: BatchWeight, trainer: pl.Trainer) -> None:
        self._weigh = weigh
        self._device = trainer.strategy.root_device
        self._num_ranks = trainer.world_size
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self._reference: Tensor | None = None
        self._weight = self._sum = torch.zeros((), dtype=self._dtype, device=self._device)

    def open(self) -> None:
        """Begin a window."""
        self._sum = torch.zeros_like(self._sum)

    def begin(self, batch: Any) -> None:
        """Weigh the next batch. The first call must come on all ranks at once."""
        weight = self._weigh(batch)
        if not isinstance(weight, Tensor):
            weight = torch.full_like(self._sum, weight)  # unlike torch.tensor, it does not wait for the device
        weight = weight.detach().to(self._device, self._dtype)
        if self._reference is None:
            # Near 1 after division by it, which keeps float16 in range; a power of two, which rounds nothing.
            largest = self._reduced(weight, "MAX")
            self._reference = torch.where(largest > 0, largest / torch.frexp(largest).mantissa, 1)
        self._weight = weight / self._reference

    def add(self) -> None:
        """Count the batch that was weighed last."""
        self._sum = self._sum + self._weight

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss of the batch that was weighed last, for its backward."""
        return loss * self._weight.to(loss.device, loss.dtype)

    def factor(self, length: int) -> Tensor:
        """What gradients are to be multiplied by, after losses were scaled and divided by ``length``.

        Gradients are averaged over the ranks before. 1 where all weights are 0. To be called on all ranks at once.
        """
        mean = self._reduced(self._sum, "SUM") / self._num_ranks
        return torch.where(mean > 0, length / mean, 1)

    def _reduced(self, value: Tensor, operation: str) -> Tensor:
        if self._num_ranks == 1:
            return value
        # strategy.reduce waits at a barrier each time
        value = value.clone()
        torch.distributed.all_reduce(value, op=getattr(torch.distributed.ReduceOp, operation))
        return value
