"""The largest value over the ranks, exactly."""

import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override


class MaxOverRanks(Metric):
    """Element-wise maximum of integers over updates and over ranks, -1 where there was none.

    ``torchmetrics.MaxMetric`` computes in float32, which rounds bytes above 16 MiB.

    Args:
        num_values: Number of integers K.

    Shape:
        ``update``: [K] of dtype int64; ``compute``: [K] of dtype int64.
    """

    full_state_update = False
    values: Tensor

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.add_state("values", default=torch.full((num_values,), -1), dist_reduce_fx="max")

    @override
    def update(self, values: Tensor) -> None:
        self.values = torch.maximum(self.values, values.to(self.values))

    @override
    def compute(self) -> Tensor:
        return self.values
