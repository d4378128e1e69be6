"""Weights of the micro-batches of a window, on all ranks, without looking ahead."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_vram.core.batches.weights import BatchWeight


class AccumulationWeights:
    """Weights of one window after the other. They stay on the device.

    Losses are in units of the first weight above 0, so that float16 stays in range. All ranks agree about it, by one
    more reduction for each batch until there is one; that is the only time the host waits for the device.
    """

    def __init__(self, weigh: BatchWeight, trainer: pl.Trainer) -> None:
        self._weigh = weigh
        self._device = trainer.strategy.root_device
        self._num_ranks = trainer.world_size
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self._reference: Tensor | None = None
        self.is_known_zero = False  # whether the batch has weight 0, known without waiting for a device
        self._weight = self._sum = torch.zeros((), dtype=self._dtype, device=self._device)

    def begin(self, batch: Any, *, is_first: bool) -> None:
        """Weigh the next batch, or the first one of a window. All ranks call this or :meth:`pass_over`."""
        if is_first:
            self._sum = torch.zeros_like(self._sum)
        weight = self._weigh(batch)
        self.is_known_zero = (not isinstance(weight, Tensor) or weight.device.type == "cpu") and bool(weight == 0)
        if not isinstance(weight, Tensor):
            weight = torch.full_like(self._sum, weight)  # unlike torch.tensor, it does not wait for the device
        weight = weight.detach().to(self._device, self._dtype)
        self._find_reference(weight)
        self._weight = weight if self._reference is None else weight / self._reference

    def pass_over(self) -> None:
        """Take part in the reductions of the other ranks, without a batch."""
        self._find_reference(torch.zeros_like(self._sum))

    def scale(self, loss: Tensor, *, is_new: bool) -> Tensor:
        """Multiply a loss of the last batch by its weight, which counts once for several losses."""
        if is_new:
            self._sum = self._sum + self._weight
        return loss * self._weight.to(loss.device, loss.dtype)

    def factor(self, length: int) -> Tensor:
        """Return the factor of gradients whose losses were scaled and divided by ``length``. A collective.

        Gradients are averaged over the ranks before. The factor is 1 where all weights are 0.
        """
        mean = self._reduced(self._sum, "SUM") / self._num_ranks
        return torch.where(mean > 0, length / mean, 1)

    def _find_reference(self, weight: Tensor) -> None:
        if self._reference is not None:
            return
        largest = self._reduced(weight, "MAX")
        if largest > 0:
            self._reference = largest / torch.frexp(largest).mantissa  # a power of two, which rounds nothing

    def _reduced(self, value: Tensor, operation: str) -> Tensor:
        if self._num_ranks == 1:
            return value
        # strategy.reduce waits at a barrier each time
        value = value.clone()
        torch.distributed.all_reduce(value, op=getattr(torch.distributed.ReduceOp, operation))
        return value
