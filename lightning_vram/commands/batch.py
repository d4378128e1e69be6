"""The commands ``estimate`` and ``plan``, which run the classes of a configuration without training."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


def make_batch(shape: Any, dtype: Any = "float32", high: Any = 2) -> Any:
    """Make the tensors of a batch.

    Example:
        >>> images, labels = make_batch([[8, 3, 4, 4], [8]], ["float32", "int64"], high=10)
        >>> images.shape, labels.dtype
        (torch.Size([8, 3, 4, 4]), torch.int64)
    """
    if isinstance(shape, Mapping) and shape:
        return {key: make_batch(shape[key], _part(dtype, key, "dtype"), _part(high, key, "high")) for key in shape}
    if not isinstance(shape, list) or not shape:
        raise ValueError(
            f"batch.shape must be sizes, as in '[8, 3, 224, 224]', or several of them, as in '[[8, 3, 224, 224], [8]]' "
            f"or '{{tokens: [8, 1024]}}', got {shape!r}."
        )
    if all(isinstance(size, list | Mapping) for size in shape):
        made = [make_batch(part, _part(dtype, i, "dtype"), _part(high, i, "high")) for i, part in enumerate(shape)]
        return tuple(made)
    return _make_tensor(shape, dtype, high)


def _make_tensor(shape: list[Any], dtype: Any, high: Any) -> Tensor:
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape):
        raise ValueError(f"batch.shape must be whole numbers of at least 1, got {shape!r}.")
    if dtype not in _DTYPES:
        raise ValueError(f"batch.dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
    if not isinstance(high, int) or isinstance(high, bool) or high < 1:
        raise ValueError(f"batch.high must be a whole number of at least 1, got {high!r}.")
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind is torch.bool:
        return torch.zeros(shape, dtype=kind)
    if high - 1 > torch.iinfo(kind).max:
        raise ValueError(f"batch.high is {high}, more than {dtype} can hold.")
    return torch.randint(high, shape, dtype=kind)


def _part(nest: Any, key: Any, name: str) -> Any:
    """What is said of one tensor: ``nest`` itself, if it is said of all."""
    if not isinstance(nest, list | Mapping):
        return nest
    try:
        return nest[key]
    except (LookupError, TypeError):
        raise ValueError(f"batch.{name} has no entry for tensor {key!r} of batch.shape, got {nest!r}.") from None
