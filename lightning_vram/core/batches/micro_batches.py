"""Weigh micro-batches, combine their outputs, and let batch norms count them as one batch.

The mean of two losses is that of both batches together only where both divide by the same number. A loss over tokens
divides by those that are not ignored, which differ from batch to batch.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_vram.core.batches import splitting
from lightning_vram.private_names.torch import BatchNormBase, NormBase

WeightName = Literal["samples", "tokens", "shifted_tokens"]
BatchWeight = Callable[[Any], "float | Tensor"]
"""From a batch to its weight: a number, or a tensor with one element, which may stay on its device."""

IGNORE_INDEX = -100  # of torch.nn.functional.cross_entropy
_WEIGH_WAY_OUT = "Give a function of the batch that returns its weight."
_LABEL_KEYS = ("labels", "label", "targets", "target")


def make_batch_weight(weight: WeightName | BatchWeight, name: str, *also: str) -> BatchWeight:
    """Make the function that weighs batches; ``name``: the argument as typed, ``also``: further allowed texts.

    ``"samples"`` counts samples. ``"tokens"`` counts labels that are not -100: under ``"labels"`` (or ``"label"``,
    ``"targets"``, ``"target"``) of a mapping, the last of a sequence, or all of a single tensor. ``"shifted_tokens"``
    leaves out the first label of each sequence, as losses do that shift labels by one. A function weighs by itself; its
    value is checked unless it is a tensor on an accelerator, which would block the host.
    """
    if weight == "samples":
        splitter = splitting.BatchSplitter()  # one for all: it learns from batch to batch
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


def _count_samples(splitter: splitting.BatchSplitter, batch: Any, name: str) -> float:
    try:
        return float(splitter.batch_size(batch))
    except splitting.BatchSplitError as error:
        problem = re.split(r" (?=To split|If it belongs|Please )", str(error))[0]  # without advice on cutting it
        raise ValueError(
            f"{name}='samples' cannot count the samples of a batch. Give a function of the batch that returns their "
            f"number, or {splitting.SPLIT_HOOK}. {problem}"
        ) from None


def _count_labels(labels: Tensor) -> Tensor:
    return (labels != IGNORE_INDEX).sum()


def _find_labels(batch: Any, name: str, weight: str) -> Tensor:
    labels = batch
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in _LABEL_KEYS if key in batch.keys()), None)  # noqa: SIM118 - iter(): rows
    elif isinstance(batch, list | tuple) and batch:
        labels = batch[-1]
    if isinstance(labels, Tensor) and not labels.is_floating_point() and not labels.is_complex():
        return labels
    raise ValueError(f"{name}={weight!r} found no integer labels in {splitting.describe_all(batch)}. {_WEIGH_WAY_OUT}")


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


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float], sizes: Sequence[int]) -> Tensor:
    """Return the mean of ``values``; ``sizes`` weigh if all ``weights`` are 0. Equal values stay bitwise equal.

    A value with weight 0 does not count, even if it is NaN: the mean over no tokens is 0 / 0.
    """
    total = sum(map(float, weights))
    if not total:
        weights, total = sizes, sum(sizes)
    counted = [(value, float(weight) / total) for value, weight in zip(values, weights, strict=True) if weight]
    first = mean = counted[0][0]
    plain = torch.zeros_like(first)
    for value, share in counted:
        mean = mean + (value - first) * share
        plain = plain + value * share
    # From differences to the first value; if that is infinite, they are NaN, and the sum is used.
    return torch.where(first.isfinite(), mean, plain).to(first.dtype)


_COMBINE_HOOK = "Define combine_outputs(outputs, sizes) on the LightningModule."


class OutputCombineError(ValueError):
    """Outputs cannot be combined; the message names the entry, what was found, and the way out."""


def combine_outputs(outputs: Sequence[Any], sizes: Sequence[int], shares: Sequence[float], batch_dim: int = 0) -> Any:
    """Combine the outputs of micro-batches of ``sizes`` samples; joined or averaged entries have no graph.

    The rule, entry by entry, through mappings, lists, tuples, dataclasses and the like:

    * the same object, or an equal text, ``bool`` or ``None`` in all: that,
    * tensors and arrays with as many rows as there are samples, also along ``batch_dim``: all rows, in order,
    * single numbers with a fraction, as losses are: their mean, weighted by ``shares``; equal ones stay bitwise equal,
    * lists with an entry for each sample: all entries, in order,
    * anything else: refused (``OutputCombineError``). So are whole numbers, which may be counts or the same for all,
      and mappings with whole numbers for keys.

    A tensor that has as many rows as each micro-batch has samples by chance, such as a histogram, cannot be
    distinguished from one with a row for each.

    Example:
        >>> parts = [{"loss": 1.0, "logits": torch.zeros(3, 2)}, {"loss": 5.0, "logits": torch.ones(1, 2)}]
        >>> whole = combine_outputs(parts, [3, 1], [0.75, 0.25])
        >>> whole["loss"], whole["logits"].shape
        (2.0, torch.Size([4, 2]))
    """
    if len(outputs) == 1:
        return outputs[0]
    return _Combination(sizes, shares, batch_dim).combine(list(outputs), splitting.BatchPath("output"))


class _Combination:
    """Combines entries of outputs; counts the entries that it joined row by row."""

    def __init__(self, sizes: Sequence[int], shares: Sequence[float], batch_dim: int) -> None:
        self.sizes = list(sizes)
        self.shares = shares
        self.batch_dim = batch_dim
        self.num_joined = 0

    def combine(self, values: list[Any], path: splitting.BatchPath) -> Any:
        first = values[0]
        if _is_count(first):
            raise _refuse(path, values, "are ambiguous: counts that add up, or one value for all")
        if all(value is first for value in values):
            return first
        if any(type(value) is not type(first) for value in values):
            raise _refuse(path, values, "have different types")
        if (isinstance(first, Tensor) and not first.is_nested) or splitting.is_array(first):
            return self._join(values, path) if first.ndim else self._average_tensors(values, path)
        parts = splitting.take_apart(first)
        if parts is not None:
            return self._combine_lists(values, path) if parts.is_list else self._combine_columns(values, path)
        if splitting.is_constant(first) and all(value == first for value in values):
            return first
        if isinstance(first, float) or getattr(getattr(first, "dtype", None), "kind", "") == "f":  # or a NumPy number
            tensors = [torch.tensor(float(value), dtype=torch.float64) for value in values]
            return type(first)(weighted_mean(tensors, self.shares, self.sizes).item())
        reason = f"differ: {values[0]!r}, {values[1]!r}" if splitting.is_constant(first) else "are unknown"
        raise _refuse(path, values, reason)

    def _join(self, values: list[Any], path: splitting.BatchPath) -> Any:
        first = values[0]
        candidates = [dim for dim in dict.fromkeys((0, self.batch_dim)) if dim < min(one.ndim for one in values)]
        dims = [dim for dim in candidates if [one.shape[dim] for one in values] == self.sizes]
        if not dims:
            raise _refuse(path, values, f"do not have a row for each of {self.sizes} samples")
        if len(dims) > 1:
            raise _refuse(path, values, f"have a row for each of {self.sizes} samples in dimensions {dims}")
        self.num_joined += 1
        shapes = {(value.dtype, *value.shape[: dims[0]], *value.shape[dims[0] + 1 :]) for value in values}
        if len(shapes) > 1:
            raise _refuse(path, values, "differ in more than the number of rows")
        if isinstance(first, Tensor):
            return torch.cat([value.detach() for value in values], dims[0])
        return sys.modules["numpy"].concatenate(values, dims[0])

    def _average_tensors(self, values: list[Any], path: splitting.BatchPath) -> Any:
        first = values[0]
        if any(value.dtype != first.dtype for value in values):
            raise _refuse(path, values, "differ in dtype")
        if not isinstance(first, Tensor):
            return self.combine([value[()] for value in values], path)
        return weighted_mean([value.detach() for value in values], self.shares, self.sizes)

    def _combine_columns(self, values: list[Any], path: splitting.BatchPath) -> Any:
        all_parts = [parts for parts in map(splitting.take_apart, values) if parts is not None]
        if not all_parts[0].is_list and any(isinstance(label, int) for label in all_parts[0].labels):
            raise _refuse(path, values, "have integer keys, which may be samples or classes")
        if any(parts.labels != all_parts[0].labels for parts in all_parts):
            raise _refuse(path, values, "differ in " + ("length" if all_parts[0].is_list else "what they hold"))
        columns = zip(*(parts.values for parts in all_parts), strict=True)
        paths = path.children(all_parts[0])
        return all_parts[0].build([self.combine(list(c), child) for c, child in zip(columns, paths, strict=True)])

    def _combine_lists(self, values: list[Any], path: splitting.BatchPath) -> Any:
        """Combine lists as columns if rows are joined inside, else as one entry for each sample."""
        if [len(value) for value in values] != self.sizes:
            return self._combine_columns(values, path)
        columns = _Combination(self.sizes, self.shares, self.batch_dim)
        try:
            combined = columns._combine_columns(values, path)
        except OutputCombineError:
            columns.num_joined = 0
        if not columns.num_joined:
            self.num_joined += 1
            return splitting.take_apart(values[0]).build([entry for value in values for entry in _detach(value)])  # type: ignore[union-attr]
        if isinstance(values[0], list) and splitting.is_uniform(values[0]):
            raise _refuse(path, values, "are ambiguous: columns, or an entry for each sample")
        self.num_joined += columns.num_joined
        return combined


def _detach(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    parts = splitting.take_apart(value)
    return value if parts is None else parts.build([_detach(part) for part in parts.values])


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        kind = value.dtype
        return not (value.ndim or kind.is_floating_point or kind.is_complex or kind is torch.bool)
    dtype = getattr(value, "dtype", None)
    if dtype is not None:
        return not getattr(value, "ndim", 0) and dtype.kind in "iu"
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(path: splitting.BatchPath, values: Sequence[Any], reason: str) -> OutputCombineError:
    found = ", ".join(dict.fromkeys(splitting.describe(value) for value in values))
    return OutputCombineError(f"{path.code} cannot be combined: its values ({found}) {reason}. {_COMBINE_HOOK}")


def find_batch_norms(module: nn.Module) -> tuple[str, ...]:
    """Names of the layers within ``module`` that normalise by the statistics of the batch in their present mode."""
    return tuple(
        name
        for name, part in module.named_modules()
        # Without running statistics it normalises by the batch in eval mode, too.
        if isinstance(part, BatchNormBase) and (part.training or part.running_mean is None)
    )


class NormMomentum:
    """Scales and restores the momentum of all layers of a module that have running statistics.

    A batch norm moves its running statistics by ``momentum`` m in every forward. With ``1 - (1 - m)**(1 / k)`` the k
    parts of a batch together move them as much as the batch. Layers in eval mode at the time of :meth:`scale`, without
    running statistics, or with a cumulative mean (``momentum=None``, correct in any case) are left alone.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = {name: part for name, part in module.named_modules() if isinstance(part, NormBase)}
        self._saved: dict[str, float] = {}
        self._written: dict[str, float] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted names of the layers whose statistics are corrected in their present mode."""
        return tuple(
            name
            for name, layer in self._layers.items()
            if layer.training and layer.track_running_stats and layer.momentum is not None
        )

    def scale(self, share: float) -> None:
        """Let one update count as much as ``share`` of an update: 1 / k for each of k equal parts, in (0, 1]."""
        for name in self.names:
            layer = self._layers[name]
            momentum = self._saved.setdefault(name, layer.momentum)  # type: ignore[arg-type]
            self._written[name] = momentum if share == 1 else 1 - (1 - momentum) ** share  # exactly 1
            layer.momentum = self._written[name]

    def restore(self) -> None:
        """Put the momentum back, unless other code has written it since. Calling it again does nothing."""
        for name, momentum in self._saved.items():
            if self._layers[name].momentum == self._written[name]:
                self._layers[name].momentum = momentum
        self._saved, self._written = {}, {}
