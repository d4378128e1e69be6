"""Batches of other sizes, as shapes, without a sample of data."""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import environments
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lightning_vram.core.batches.path import BatchSplitError, SharedKeys
from lightning_vram.core.batches.sizing import find_reading
from lightning_vram.core.batches.splitting import BatchSplitter
from lightning_vram.core.batches.structure import take_apart
from lightning_vram.memory.estimate.fakes.known_values import MOST_INTEGERS

_ENVIRONMENTS = ("SLURM", "TorchElastic", "LSF", "MPI", "Lightning")
_HOW = "Pass one: estimate_memory(module, batch, ...) takes any nest of tensors; only shapes and dtypes count"


class FreshBatches:
    """A loader that makes each batch on request."""

    def __init__(self, make: Callable[[], Any], num_batches: int) -> None:
        self.make = make
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num_batches):
            yield self.make()

    def __len__(self) -> int:
        return self._num_batches


def first_batch(module: pl.LightningModule, datamodule: pl.LightningDataModule | None) -> Any:
    """Return the first batch that a run would train on. It runs ``prepare_data``, which the next fit then skips."""
    source: Any = datamodule if datamodule is not None else module
    name = type(source).__name__
    try:
        if is_overridden("prepare_data", source):
            _prepare(source)
        if datamodule is not None:
            datamodule.setup("fit")
        loader = CombinedLoader(source.train_dataloader())
        batch, _, _ = next(iter(loader))
    except StopIteration:
        raise ValueError(f"{name}.train_dataloader() has no batch. {_HOW}.") from None
    except Exception as error:  # theirs can raise anything
        raise ValueError(f"{name} makes no batch: {error}. {_HOW}.") from error
    return batch


def _prepare(source: Any) -> None:
    """Run ``prepare_data`` on the rank on which Lightning would, in the place of the next call."""
    kinds = [getattr(environments, f"{name}Environment") for name in _ENVIRONMENTS]
    environment = next(kind for kind in kinds if kind.detect())()
    if environment.local_rank() == 0 and (source.prepare_data_per_node or environment.node_rank() == 0):
        source.prepare_data()
        vars(source)["prepare_data"] = partial(_forget_prepared, source)


def _forget_prepared(source: Any) -> None:
    """Stand in for one call of ``prepare_data``."""
    vars(source).pop("prepare_data", None)


def batch_size_of(batch: Any) -> int | None:
    """Return how many samples a batch has; ``None`` if unknown."""
    try:
        return find_reading(batch, SharedKeys(()), {}).size
    except BatchSplitError:
        return None


def first_samples(batch: Any, few: int) -> Any:
    """Return a batch of few of the samples of a batch; the batch, if it has as few or cannot be cut."""
    size = batch_size_of(batch)
    if size is None or size <= few:
        return batch
    try:
        return BatchSplitter().split(batch, [few, size - few])[0]
    except BatchSplitError:
        return batch


def with_batch_size(batch: Any, old: int, new: int) -> Any:
    """Return a batch of ``new`` samples in the place of ``old``: shapes, and the values of integers, repeated."""
    return _reshape(batch, lambda shape: (new, *shape[1:]) if shape and shape[0] == old else shape)


def sequence_length_of(batch: Any) -> int | None:
    """Return the length of the sequences in a batch of token ids, ``[B, T]`` of integers; ``None`` if it has none."""
    lengths = {t.shape[1] for t in _tensors(batch) if t.dim() == 2 and not t.is_floating_point()}
    return lengths.pop() if len(lengths) == 1 else None


def with_sequence_length(batch: Any, old: int, new: int) -> Any:
    """Return a batch whose sequences are ``new`` long in the place of ``old``: shapes, and the largest of integers."""
    return _reshape(batch, lambda shape: (*shape[:1], *(new if length == old else length for length in shape[1:])))


def count_elements(batch: Any) -> int:
    """Return how many numbers are in the tensors of a batch."""
    return sum(tensor.numel() for tensor in _tensors(batch))


def largest_shape(batch: Any) -> list[int]:
    """Return the shape of the tensor of a batch that has the most elements; of none, an empty one."""
    shapes = [tensor.shape for tensor in _tensors(batch) if not tensor.is_nested]
    return list(max(shapes, key=torch.Size.numel, default=()))


def map_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with other tensors, in new containers of the same kinds."""
    if isinstance(batch, Tensor):
        return change(batch)
    parts = take_apart(batch)
    return batch if parts is None else parts.build([map_tensors(part, change) for part in parts.values])


def _reshape(batch: Any, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
    return map_tensors(batch, lambda one: _like(one, change(tuple(one.shape))))


def _like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """More samples have the values of those that are there; longer ones the largest, which is no padding."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    if (
        not is_plain
        or tensor.is_floating_point()
        or tensor.is_complex()
        or not tensor.numel()
        or prod(shape) > MOST_INTEGERS
    ):
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    if shape[1:] == tensor.shape[1:]:
        return tensor[torch.arange(shape[0]) % tensor.shape[0]]
    return torch.full(shape, tensor.max().item(), dtype=tensor.dtype)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = take_apart(value)
    return [] if parts is None else [leaf for part in parts.values for leaf in _tensors(part)]
