"""How much each micro-batch counts in its batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Weight = Callable[[Any], float | Tensor]


def shares_of(parts: Sequence[Any], sizes: Sequence[int], weight: Weight | None) -> list[float]:
    """Return shares that add up to one.

    Args:
        parts: The micro-batches.
        sizes: Their numbers of samples.
        weight: What a micro-batch counts, such as its number of tokens; ``None`` for samples. Where all weights are
            zero, samples count. The host waits for weights that are tensors, once for all of them.
    """
    by_samples = [size / sum(sizes) for size in sizes]
    if weight is None or len(parts) == 1:
        return by_samples
    weights = _read([weight(part) for part in parts])
    total = sum(weights)
    return [one / total for one in weights] if total > 0 else by_samples


def _read(weights: Sequence[float | Tensor]) -> list[float]:
    tensors = [one.detach().reshape(()) for one in weights if isinstance(one, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(values) if isinstance(one, Tensor) else float(one) for one in weights]
