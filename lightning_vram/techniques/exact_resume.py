"""A plain DataLoader that knows its position, so that a run resumes with the next batch. May import: core, memory.

A loader changes its class only. An order cannot be saved, since samplers may draw it bit by bit: what it was drawn from
is. Data that is skipped is not loaded, only its indices are drawn again. It costs 33 kB for each loader in a
checkpoint. Random numbers that the dataset draws in workers start anew. Of several ranks one state is saved: the
samplers of all must go by the same generators, or by seed and epoch (``DistributedSampler``).
"""

import copyreg
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, Sampler
from typing_extensions import override

from lightning_vram.core.random_state import (
    State,
    read_global_states,
    read_state,
    source_of,
    with_global_states,
    write_state,
)
from lightning_vram.private_names.torch import staying_iterator

_ORDER = "_lightning_vram_order"  # on instances; Lightning passes over names that begin with an underscore
_stateful_classes: dict[type[Any], type[Any]] = {}  # made once, so that types compare


def can_be_stateful(loader: object) -> str:
    """Return why :func:`make_stateful` would refuse ``loader``, as the end of a sentence; "" if it would not."""
    if not isinstance(loader, DataLoader):
        return "it is not a DataLoader"
    if isinstance(loader, _StatefulLoader):
        return ""
    reasons = {
        "its dataset is an IterableDataset, which has no positions": isinstance(loader.dataset, IterableDataset),
        "it has its own state_dict": hasattr(loader, "state_dict") or hasattr(loader, "load_state_dict"),
        "its class defines its own iteration": type(loader).__iter__ is not DataLoader.__iter__,
        "its sampler has no length": not has_length(loader),
        "in_order=False yields batches in any order": loader.num_workers > 0 and not getattr(loader, "in_order", True),
        "its workers are already running (persistent_workers)": staying_iterator(loader) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def has_length(loader: Any) -> bool:
    """Return whether the number of batches is known."""
    try:
        return len(loader) >= 0
    except TypeError:
        return False


def make_stateful(loader: DataLoader[Any]) -> None:
    """Let :func:`loader_state` know where ``loader`` is. Copies and pickles of it are plain loaders.

    After :func:`load_loader_state` the next ``iter(loader)``, and only that, goes on where the state was saved, in
    the same order. A state that was saved between two iterations begins a new order; generators that the loader or its
    samplers have for themselves go on as they would have.

    The epoch of a distributed sampler is part of the order that is gone on with. That of a new order is not: with
    workers it is drawn in ``iter()``, so the epoch has to be set before (Lightning 2.6 sets it after, when it resumes).

    Args:
        loader: One that :func:`can_be_stateful` accepts. Again does nothing.

    Raises:
        TypeError: If ``loader`` is no ``DataLoader``.
        ValueError: If it cannot be stateful.
    """
    reason = can_be_stateful(loader)
    original: type[Any] = type(loader)
    if reason:
        error = ValueError if issubclass(original, DataLoader) else TypeError
        raise error(f"loader {original.__name__} cannot be made stateful: {reason}.")
    if isinstance(loader, _StatefulLoader):
        return
    if original not in _stateful_classes:
        attributes = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        metaclass: Any = type(original)
        _stateful_classes[original] = metaclass(original.__name__, (_StatefulLoader, original), attributes)
    loader.__class__ = _stateful_classes[original]


def remove_state(loader: DataLoader[Any]) -> None:
    """Undo :func:`make_stateful`. Twice does nothing."""
    if isinstance(loader, _StatefulLoader):
        vars(loader).pop(_ORDER, None)
        loader.__class__ = type(loader).__bases__[-1]


def loader_state(loader: DataLoader[Any], *, epoch_has_ended: bool = False) -> State:
    """Return the place of the newest iteration; tensors, numbers, strings, lists and dictionaries only.

    A function, for Lightning would put the state of a loader that has a ``state_dict`` into every checkpoint by itself,
    and refuse to load it where the loader has none.

    Args:
        loader: One that was made stateful.
        epoch_has_ended: Whether the state begins a new order. An epoch may end before the loader does
            (``limit_train_batches``), and after it, if a longer loader is next to it.
    """
    order = _order(loader)
    if epoch_has_ended:
        order.loaded = order.newest = None
    if order.loaded is not None:
        return order.loaded
    newest = order.newest
    if newest is not None and newest.started is not None:
        return {"num_batches": newest.num_batches, "made": newest.made, "started": newest.started}
    # The next order is not drawn yet: of what it depends on, nobody else would save these.
    return {"num_batches": 0, "own": order.own_states() if newest is None else newest.made["own"]}


def load_loader_state(loader: DataLoader[Any], state: State) -> None:
    """Let the next iteration, and only that, go on where ``state`` was saved; ``ValueError`` if it cannot."""
    order = _order(loader)
    own = state["own"] if "own" in state else state["made"]["own"]
    generators = order.own_generators()
    if state["num_batches"] > len(loader) or len(own) != len(generators):
        raise ValueError(
            f"load_loader_state(loader, state) begins after {state['num_batches']} batches with {len(own)} generators, "
            f"the loader has {len(loader)} with {len(generators)}. "
            "Create the loader as it was when the state was saved."
        )
    if "own" in state:
        order.set_own_states(own)
    order.loaded, order.newest = state if "made" in state else None, None


def share_generators(loaders: Iterable[DataLoader[Any]]) -> bool:
    """Return whether two of ``loaders`` draw from one generator, which no state of either has as it is now."""
    generators = [id(generator) for loader in loaders for generator in _order(loader).own_generators()]
    return len(set(generators)) < len(generators)


@dataclass
class _Order:
    """What the order of a loader depends on, and its newest iteration; stands in for the sampler of its iterators."""

    # It refers to no iterator, which would keep workers alive.

    sampler: Any  # or batch sampler; inner samplers are found in its attributes
    generator: Generator | None  # that of the loader, which seeds its workers
    loaded: State | None = None  # for the next iteration
    newest: "_Iteration | None" = None

    def __iter__(self) -> Iterator[Any]:
        self.newest = _Iteration(self)
        return self.newest.indices()

    def __len__(self) -> int:
        return len(self.sampler)

    def note(self) -> State:
        """Return what an order that is drawn now depends on: generators and, of distributed samplers, the epoch."""
        epochs = [getattr(each, "epoch", None) if hasattr(each, "set_epoch") else None for each in self._samplers()]
        epochs = [epoch if isinstance(epoch, int) else None for epoch in epochs]
        return {"epochs": epochs, "own": self.own_states(), "global": read_global_states()}

    def restore(self, note: State) -> None:
        """Set all but the global generators to what they were at the note."""
        for sampler, epoch in zip(self._samplers(), note["epochs"], strict=False):
            if epoch is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # first: it may seed a generator
        self.set_own_states(note["own"])

    def own_states(self) -> list[State]:
        return [read_state(generator) for generator in self.own_generators()]

    def set_own_states(self, states: list[State]) -> None:
        for generator, state in zip(self.own_generators(), states, strict=True):
            write_state(generator, state)

    def own_generators(self) -> list[Any]:
        """Return the generators that the loader and its samplers have for themselves."""
        values = [value for sampler in self._samplers() for _, value in _attributes(sampler)]
        return list({id(value): value for value in [self.generator, *values] if source_of(value) is not None}.values())

    def _samplers(self) -> list[object]:
        """Return the sampler and all that it is made of, always in the same order."""
        found: dict[int, object] = {}
        waiting = [self.sampler]
        while waiting:
            current = waiting.pop()
            if id(current) not in found:
                found[id(current)] = current
                waiting += [part for name, value in _attributes(current) for part in _parts(name, value)]
        return list(found.values())


def _parts(name: str, value: object) -> list[object]:
    if isinstance(value, (list, tuple)):  # of samplers, or of very many indices
        return list(value) if value and isinstance(value[0], Sampler) else []
    # What holds a sampler may be no sampler itself: Lightning's DistributedSamplerWrapper has one in a dataset.
    holds_one = any(isinstance(part, Sampler) for _, part in _attributes(value))
    return [value] if name.endswith("sampler") or isinstance(value, Sampler) or holds_one else []


def _attributes(value: object) -> list[tuple[str, object]]:
    return list(vars(value).items()) if hasattr(value, "__dict__") and not isinstance(value, type) else []


class _Iteration:
    """One iteration over a sampler, and how many batches of it were handed out: with workers, fewer than drawn."""

    # Samplers draw either in iter() or at the first next (generator functions), so there are two notes.

    def __init__(self, order: _Order) -> None:
        self._order = order
        if order.loaded is None:
            self.num_batches: int = 0
            self.made: State = order.note()
            self.started: State | None = None
            self._all = iter(order.sampler)
            return
        self.num_batches, self.made, self.started = (order.loaded[name] for name in ("num_batches", "made", "started"))
        order.restore(self.made)
        with with_global_states(self.made["global"]):
            self._all = iter(order.sampler)

    def indices(self) -> Iterator[Any]:
        """Yield the indices that are left."""
        if self.started is None:
            self.started = self._order.note()  # the trainer sets the epoch of samplers after iter()
            yield from self._all
            return
        num_skipped = self.num_batches
        self._order.restore(self.started)
        with with_global_states(self.started["global"]):
            first = list(islice(self._all, 1))
            for _ in islice(self._all, max(num_skipped - 1, 0)):
                pass
        yield from first[num_skipped:]
        # A sampler that draws from a global generator for each batch goes on with the numbers of the run.
        yield from self._all

    def count(self, batch: Any) -> Any:
        self.num_batches += 1
        return batch


class _StatefulLoader(DataLoader[Any]):
    """Mixed in before the class of a loader."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep registries and checks that the user's classes hang here from seeing ours."""

    @override
    def __iter__(self) -> Any:
        order, name = _order(self), _sampler_name(self)
        vars(self)[name] = order
        try:
            iterator = super().__iter__()
        finally:
            vars(self)[name] = order.sampler  # others see the sampler they know
        order.loaded = None  # not before: torch begins iterations twice where there are workers
        assert order.newest is not None
        return map(order.newest.count, iterator)

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes: Any = super().__reduce_ex__(protocol)[2]
        plain = {name: value for name, value in attributes.items() if name != _ORDER}
        return copyreg._reconstructor, (type(self).__bases__[-1], object, None), plain  # type: ignore[attr-defined]


def _order(loader: Any) -> _Order:
    # Made when it is needed: Lightning makes loaders of the same class anew, to put a distributed sampler in.
    if _ORDER not in vars(loader):
        vars(loader)[_ORDER] = _Order(getattr(loader, _sampler_name(loader)), loader.generator)
    return vars(loader)[_ORDER]  # type: ignore[no-any-return]


def _sampler_name(loader: DataLoader[Any]) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"
