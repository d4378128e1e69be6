"""The first batches of a run, read in advance: the run finds its data as if nobody had read it."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_vram.core.random_state.generators import is_generator, read_state, write_state
from lightning_vram.private_names.lightning.loops import takes_turns, training_source
from lightning_vram.private_names.torch.trees import tree_map

_READ_BY_PLACE = (list, tuple, Tensor)
_MOST_PARTS = 10_000
_MOST_TRANSFORMS = 64  # longer lists are samples


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
    found: dict[int, list[Any]] = {}

    def read(loader: Any) -> None:
        found[id(loader)] = _first_of(loader, most)

    def batch_at(place: int, loader: Any) -> Any:
        batches = found[id(loader)]
        return batches[place % len(batches)]

    sources = combined.flattened[0] if takes_turns(combined) else combined.iterables
    tree_map(read, sources)
    if not all(found.values()):
        raise ValueError("the data has no batch")
    batches = [tree_map(partial(batch_at, place), sources) for place in range(max(map(len, found.values())))]
    return batches, _length(combined, trainer.limit_train_batches)


def _length(combined: CombinedLoader, limit: int | float) -> int | None:
    lengths = [sized_len(loader) for loader in combined.flattened]
    known = [length for length in lengths if length is not None]
    length = max(known) if len(known) == len(lengths) else None
    if isinstance(limit, int):
        return limit if length is None else min(length, limit)
    return length if length is None else int(limit * length)


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
    if not isinstance(loader, _READ_BY_PLACE):
        loader = _copy(loader)
    return list(islice(loader, most))


def _first_of_loader(loader: DataLoader[Any], most: int) -> list[Any]:
    """Read it in this process: no worker begins, and what the loader keeps of its iterations stays."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        samples = iter(_copy(dataset))
        parts = samples if loader.batch_size is None else iter(lambda: list(islice(samples, loader.batch_size)), [])
        return [loader.collate_fn(part) for part in islice(parts, most)]
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    states = [(generator, read_state(generator)) for generator in _generators_of(dataset)]
    try:
        read: Callable[[Any], Any] = dataset.__getitem__
        if loader.batch_sampler is not None:
            read = getattr(dataset, "__getitems__", lambda places: [dataset[place] for place in places])
        places = islice(copy.deepcopy(sampler, {id(dataset): dataset}), most)
        return [loader.collate_fn(read(place)) for place in places]
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
    found: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    waiting = [dataset]
    while waiting and len(seen) < _MOST_PARTS:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, type | ModuleType | Tensor):
            continue
        seen[id(part)] = part
        if is_generator(part):
            found[id(part)] = part
        elif isinstance(part, list | tuple):
            waiting += part if len(part) <= _MOST_TRANSFORMS else []
        else:
            waiting += getattr(part, "__dict__", {}).values()
    return list(found.values())
