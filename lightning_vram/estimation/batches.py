"""Batches of other sizes, as shapes, without a sample of data."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import prod
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.plugins import environments
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_vram.core.batches.splitting import BatchSplitError, BatchSplitter, take_apart
from lightning_vram.core.random_state import read_state, source_of, write_state
from lightning_vram.memory.estimate.known_values import MOST_INTEGERS
from lightning_vram.private_names.lightning import is_sequential_loader, training_source
from lightning_vram.private_names.torch import tree_map

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
            # on the rank on which Lightning would, in the place of the next call
            kinds = [getattr(environments, f"{kind}Environment") for kind in _ENVIRONMENTS]
            environment = next(kind for kind in kinds if kind.detect())()
            if environment.local_rank() == 0 and (source.prepare_data_per_node or environment.node_rank() == 0):
                source.prepare_data()
                vars(source)["prepare_data"] = partial(_forget_prepared, source)
        if datamodule is not None:
            datamodule.setup("fit")
        return next(iter(CombinedLoader(source.train_dataloader())))[0]
    except StopIteration:
        raise ValueError(f"{name}.train_dataloader() has no batch. {_HOW}.") from None
    except Exception as error:  # theirs can raise anything
        raise ValueError(f"{name} makes no batch: {error}. {_HOW}.") from error


def _forget_prepared(source: Any) -> None:
    """Stand in for one call of ``prepare_data``."""
    vars(source).pop("prepare_data", None)


def batch_size_of(batch: Any) -> int | None:
    """Return how many samples a batch has; ``None`` if unknown."""
    try:
        return BatchSplitter().batch_size(batch)
    except BatchSplitError:
        return None


def first_samples(batch: Any, few: int) -> Any:
    """Return a batch of few of the samples of a batch; the batch, if it has as few or cannot be cut."""
    splitter = BatchSplitter()
    try:
        size = splitter.batch_size(batch)
        return batch if size <= few else splitter.split(batch, [few, size - few])[0]
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
    has_integers = is_plain and tensor.numel() and not (tensor.is_floating_point() or tensor.is_complex())
    if not has_integers or prod(shape) > MOST_INTEGERS:
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    if shape[1:] == tensor.shape[1:]:
        return tensor[torch.arange(shape[0]) % tensor.shape[0]]
    return torch.full(shape, tensor.max().item(), dtype=tensor.dtype)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = take_apart(value)
    return [] if parts is None else [leaf for part in parts.values for leaf in _tensors(part)]


_READ_BY_PLACE = (list, tuple, Tensor)
_MOST_PARTS = 10_000
_MOST_MEMBERS = 64


def read_first_batches(trainer: pl.Trainer, module: pl.LightningModule, most: int) -> tuple[list[Any], int | None]:
    """Return the first batches of a run, and how many an epoch has, of all ranks; ``None``: unknown."""
    source = training_source(trainer)
    if isinstance(source, pl.LightningModule):
        if not is_overridden("train_dataloader", source):
            raise ValueError("there is no data to train on")
        source = _set_up_twin(source, trainer)
    loaders = source.train_dataloader() if isinstance(source, pl.LightningModule | pl.LightningDataModule) else source
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    if not combined.flattened:
        raise ValueError("there is no data to train on")
    if isinstance(trainer.limit_train_batches, int):
        most = max(1, min(most, trainer.limit_train_batches))
    sources, leaves = combined.iterables, combined.flattened
    if is_sequential_loader(combined):
        sources, leaves = leaves[0], leaves[:1]
    found = {id(loader): _first_of(loader, most) for loader in leaves}
    if not all(found.values()):
        raise ValueError("the data has no batch")

    def batch_at(place: int, loader: Any) -> Any:
        return found[id(loader)][place % len(found[id(loader)])]

    batches = [tree_map(partial(batch_at, place), sources) for place in range(max(map(len, found.values())))]
    return batches, _length(combined, trainer.limit_train_batches)


def _length(combined: CombinedLoader, limit: int | float) -> int | None:
    lengths = [sized_len(loader) for loader in combined.flattened]
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        return limit if isinstance(limit, int) else None
    return min(max(known), limit) if isinstance(limit, int) else int(limit * max(known))


def _set_up_twin(module: pl.LightningModule, trainer: pl.Trainer) -> pl.LightningModule:
    """A module that makes its data itself may need its ``setup``, whose turn comes later: a twin runs it before."""
    if not is_overridden("setup", module):
        return module
    twin = copy.copy(module)
    for name in ("_parameters", "_buffers", "_modules"):
        vars(twin)[name] = dict(vars(module)[name])
    vars(twin)["_trainer"] = trainer
    twin.setup("fit")
    return twin


def _first_of(loader: Any, most: int) -> list[Any]:
    if isinstance(loader, DataLoader):
        stacks = loader.collate_fn is default_collate and loader.batch_size not in (None, 1)
        return _first_of_loader(loader, 1 if stacks else most)
    return list(islice(loader if isinstance(loader, _READ_BY_PLACE) else _copy(loader), most))


def _first_of_loader(loader: DataLoader[Any], most: int) -> list[Any]:
    """Read it in this process: no worker begins, and what the loader keeps of its iterations stays."""
    dataset, memo = loader.dataset, {id(loader.dataset): loader.dataset}
    options: dict[str, Any]
    if isinstance(dataset, IterableDataset):
        dataset, options = _copy(dataset), {"batch_size": loader.batch_size}
    elif loader.batch_sampler is None:
        options = {"batch_size": None, "sampler": copy.deepcopy(loader.sampler, memo)}
    else:
        options = {"batch_sampler": copy.deepcopy(loader.batch_sampler, memo)}
    states = [(generator, read_state(generator)) for generator in _generators_of(dataset)]
    try:
        return list(islice(DataLoader(dataset, collate_fn=loader.collate_fn, **options), most))
    finally:
        for generator, state in states:
            write_state(generator, state)


def _copy(iterable: Any) -> Any:
    """Return a copy to read from; what is consumed by reading has none."""
    try:
        return copy.deepcopy(iterable)
    except Exception as error:  # theirs can raise anything
        kind = type(iterable).__name__
        raise ValueError(f"reading {kind} would consume a batch of the run, and it cannot be copied") from error


def _generators_of(dataset: Any) -> list[Any]:
    """Generators that a dataset draws from by itself, or what it is made of: other datasets, transforms."""
    found: list[Any] = []
    seen: set[int] = set()
    parts = [dataset]
    for part in parts:  # it grows: the nearest are first
        is_leaf = isinstance(part, type | ModuleType | Tensor | str | int | float)
        if is_leaf or id(part) in seen or len(seen) == _MOST_PARTS:
            continue
        seen.add(id(part))  # ``parts`` keeps it alive: no other has its id
        if source_of(part) is not None:
            found.append(part)
        else:
            parts += part[:_MOST_MEMBERS] if isinstance(part, list | tuple) else getattr(part, "__dict__", {}).values()
    return found
