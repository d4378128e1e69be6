"""Weigh micro-batches, combine their outputs, and keep batches and batch norms unchanged by them.

The mean of two losses is that of both batches together only where both divide by the same number. A loss over tokens
divides by those that are not ignored, which differ from batch to batch.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_vram.core.batches.path import BatchSplitError
from lightning_vram.core.batches.sizing import HOOK
from lightning_vram.core.batches.splitting import BatchSplitter

WeightName = Literal["samples", "tokens", "shifted_tokens"]
BatchWeight = Callable[[Any], "float | Tensor"]
"""From a batch to its weight: a number, or a tensor with one element, which may stay on its device."""

IGNORE_INDEX = -100  # of torch.nn.functional.cross_entropy
_WAY_OUT = "Give a function of the batch that returns its weight."
_LABEL_KEYS = ("labels", "label", "targets", "target")


def make_batch_weight(weight: WeightName | BatchWeight, name: str, *also: str) -> BatchWeight:
    """Make the function that weighs batches; ``name``: the argument as typed, ``also``: further allowed texts.

    ``"samples"`` counts samples. ``"tokens"`` counts labels that are not -100: under ``"labels"`` (or ``"label"``,
    ``"targets"``, ``"target"``) of a mapping, the last of a sequence, or all of a single tensor. ``"shifted_tokens"``
    leaves out the first label of each sequence, as losses do that shift labels by one. A function weighs by itself; its
    value is checked unless it is a tensor on an accelerator, which would block the host.
    """
    if weight == "samples":
        splitter = BatchSplitter()  # one for all: it learns from batch to batch
        return lambda batch: _count_samples(splitter, batch, name)
    if weight == "tokens":
        return lambda batch: _count_labels(_find_labels(batch, name, weight))
    if weight == "shifted_tokens":
        return lambda batch: _count_labels(_find_labels(batch, name, weight)[..., 1:])
    allowed = f"a function or one of {', '.join((*get_args(WeightName), *also))}"
    if isinstance(weight, str):
        raise ValueError(f"{name} must be {allowed}, got {weight!r}.")
    if not callable(weight):
        raise TypeError(f"{name} must be {allowed}, got {weight!r} of type {type(weight).__name__}.")
    return lambda batch: check_weight(weight(batch), name)


def _count_samples(splitter: BatchSplitter, batch: Any, name: str) -> float:
    try:
        return float(splitter.batch_size(batch))
    except BatchSplitError as error:
        problem = re.split(r" (?=To split|If it belongs|Please )", str(error))[0]  # without advice on cutting it
        raise ValueError(
            f"{name}='samples' cannot count the samples of a batch. Give a function of the batch that returns their "
            f"number, or {HOOK}. {problem}"
        ) from None


def _count_labels(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum()


def _find_labels(batch: Any, name: str, weight: str) -> Tensor:
    labels = batch
    if isinstance(batch, Mapping):
        key = next((key for key in _LABEL_KEYS if key in batch.keys()), None)  # noqa: SIM118 - past iter() of rows
        labels = None if key is None else batch[key]
        found = f"a mapping with {', '.join(map(str, batch.keys()))}"
        if key is not None:
            found += f", whose {key!r} is {'None' if labels is None else _describe(labels)}"
    elif isinstance(batch, list | tuple) and batch:
        labels = batch[-1]
        found = f"a {type(batch).__name__} that ends with {_describe(labels)}"
    else:
        found = _describe(batch)
    if isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex():
        return labels
    raise ValueError(f"{name}={weight!r} found no integer labels in {found}. {_WAY_OUT}")


def _describe(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def check_weight(weight: Any, name: str) -> float | Tensor:
    """Return the weight that a user's function found, as a number or a tensor without dimensions; refuse all else."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        if weight.device.type != "cpu":
            return weight.detach().reshape(())
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, Real):
        found = f"a tensor of shape {list(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise TypeError(f"{name} must return a number for each batch, got {found}.")
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"{name} must return a finite number of at least 0 for each batch, got {weight}.")
    return float(weight)


def shares_of(parts: Sequence[Any], sizes: Sequence[int], weight: BatchWeight | None) -> list[float]:
    """Return how much each micro-batch counts in its batch, together 1: by samples without weights above zero."""
    by_samples = [size / sum(sizes) for size in sizes]
    if weight is None or len(parts) == 1:
        return by_samples
    weights = [weight(part) for part in parts]
    tensors = [one.detach().reshape(()) for one in weights if isinstance(one, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())  # the host blocks once for all of them
    numbers = [next(values) if isinstance(one, Tensor) else float(one) for one in weights]
    total = sum(numbers)
    return [one / total for one in numbers] if total > 0 else by_samples
