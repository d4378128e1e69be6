"""How much each micro-batch counts in the loss of its batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Weight = Callable[[Any], float | Tensor]


def shares_of(parts: Sequence[Any], sizes: Sequence[int], weight: Weight | None) -> list[float | Tensor]:
    """Return shares that add up to one.

    Args:
        parts: The micro-batches.
        sizes: Their numbers of samples.
        weight: What a micro-batch counts, such as its number of tokens; ``None`` for samples. Where all weights are
            zero, samples count.

    Returns:
        Numbers, or tensors of shape [] where weights are tensors: no device is waited for.
    """
    by_samples: list[float | Tensor] = [size / sum(sizes) for size in sizes]
    if weight is None or len(parts) == 1:
        return by_samples
    weights = [weight(part) for part in parts]
    tensors = [one for one in weights if isinstance(one, Tensor)]
    if not tensors:
        numbers = [float(one) for one in weights]
        return [one / sum(numbers) for one in numbers] if sum(numbers) > 0 else by_samples
    device = tensors[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
    stacked = torch.stack([torch.as_tensor(one, dtype=dtype, device=device).reshape(()) for one in weights])
    total = stacked.sum()
    samples = torch.tensor(by_samples, dtype=dtype, device=device)
    return list(torch.where(total > 0, stacked / total, samples).unbind())
