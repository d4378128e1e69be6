"""A plain DataLoader that knows its position, so that a run resumes with the next batch. May import: core, memory."""

import copyreg
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, Sampler
from typing_extensions import override

from lightning_vram.core.random_state import (
    State,
    is_generator,
    read_global_states,
    read_state,
    with_global_states,
    write_state,
)
from lightning_vram.private_names.torch import (
    OpenLoader,
    can_be_opened,
    index_sampler_of,
    iterates_as_stock,
    set_index_sampler,
    staying_iterator,
)


class OrderSources:
    """What the order of a sampler depends on: an order cannot be saved, since samplers may draw it bit by bit."""

    def __init__(self, sampler: Any, generator: Generator | None) -> None:
        self.sampler = sampler  # or batch sampler; inner samplers are found in its attributes
        self._generator = generator  # that of the loader, which seeds its workers

    def note(self) -> State:
        """Return what an order that is drawn now depends on: generators and, of distributed samplers, the epoch."""
        return {"epochs": self._epochs(), "own": self.own_states(), "global": read_global_states()}

    def restore(self, note: State) -> None:
        """Set all but the global generators to what they were at the note; ``ValueError`` if their number differs."""
        for sampler, epoch in zip(_samplers_in(self.sampler), note["epochs"], strict=False):
            if epoch is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)  # first: it may seed a generator
        self.set_own_states(note["own"])

    def own_states(self) -> list[State]:
        """Return the states of the generators that the loader and its samplers have for themselves."""
        return [read_state(generator) for generator in self.own_generators()]

    def set_own_states(self, states: list[State]) -> None:
        """Set these generators, after :meth:`check_own_states`."""
        self.check_own_states(states)
        for generator, state in zip(self.own_generators(), states, strict=True):
            write_state(generator, state)

    def check_own_states(self, states: list[State]) -> None:
        """Raise ``ValueError`` if there are more or fewer of these generators."""
        num_generators = len(self.own_generators())
        if num_generators != len(states):
            raise ValueError(
                f"load_loader_state(loader, state) has {len(states)} generators in the state, the loader and its "
                f"samplers have {num_generators}. Create the loader as it was when the state was saved."
            )

    def _epochs(self) -> list[int | None]:
        samplers = _samplers_in(self.sampler)
        epochs = [getattr(sampler, "epoch", None) if hasattr(sampler, "set_epoch") else None for sampler in samplers]
        return [epoch if isinstance(epoch, int) else None for epoch in epochs]

    def own_generators(self) -> list[Any]:
        """Return the generators that the loader and its samplers have for themselves."""
        values = [value for sampler in _samplers_in(self.sampler) for _, value in _attributes(sampler)]
        return list({id(value): value for value in [self._generator, *values] if is_generator(value)}.values())


class Iteration:
    """The indices of one iteration over a sampler; ``resumed``: the :meth:`state` of one to resume in the middle.

    Samplers draw either in ``iter()`` or at the first ``next`` (generator functions), so there are two notes.
    """

    def __init__(self, sources: OrderSources, resumed: State | None = None) -> None:
        self._sources = sources  # the sampler, and what its order depends on
        self._num_skipped: int = 0 if resumed is None else resumed["num_batches"]
        self._made: State = sources.note() if resumed is None else resumed["made"]
        self._started: State | None = None if resumed is None else resumed["started"]
        self._is_to_resume = self._started is not None
        self._is_started = False
        self._num_yielded = 0
        self._has_ended = False
        if resumed is None:
            self._indices = iter(sources.sampler)
        else:
            sources.restore(self._made)
            with with_global_states(self._made["global"]):
                self._indices = iter(sources.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._is_started:
            self._is_started = True
            if self._is_to_resume:
                return self._skip()
            self._started = self._sources.note()  # for the trainer sets the epoch of samplers after iter()
        return next(self._indices)

    def _skip(self) -> Any:
        assert self._started is not None
        self._sources.restore(self._started)
        with with_global_states(self._started["global"]):
            for _ in range(self._num_skipped):
                next(self._indices)
            if self._num_skipped == 0:
                return next(self._indices)
        # A sampler that draws from a global generator for each batch goes on with the numbers of the run.
        return next(self._indices)

    def count(self) -> None:
        """Note that a batch has been handed out; the indices are drawn earlier if there are workers."""
        self._num_yielded += 1

    def end(self) -> None:
        """Note that there are no more batches."""
        self._has_ended = True

    def has_ended(self) -> bool:
        """Whether all batches have been handed out: nobody needs to have asked for one more."""
        return self._has_ended or self._num_skipped + self._num_yielded >= len(self._sources.sampler)

    def state(self) -> State:
        """Return where it is: how many batches were handed out, and what the order was drawn from."""
        place = {"num_batches": self._num_skipped + self._num_yielded, "has_ended": self.has_ended()}
        return {**place, "made": self._made, "started": self._started}


def _samplers_in(sampler: object) -> list[object]:
    """Return a sampler and all that it is made of, always in the same order."""
    found: dict[int, object] = {}
    waiting = [sampler]
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


class Position:
    """What a loader knows about its newest iteration. It refers to no iterator, which would keep workers alive."""

    def __init__(self) -> None:
        self.makes_iterator = False
        self.loaded: State | None = None
        self.newest: Iteration | None = None

    def state(self, sources: OrderSources, *, epoch_has_ended: bool | None) -> State:
        """Return what is to be saved now, of a loader with these sources."""
        if epoch_has_ended:
            self.forget()
        if self.loaded is not None:
            return self.loaded
        if self.newest is None or (epoch_has_ended is None and self.newest.has_ended()):
            # The next order is not drawn yet: of what it depends on, nobody else would save these.
            return {"num_batches": 0, "own": sources.own_states()}
        return self.newest.state()

    def load(self, state: State, sources: OrderSources) -> None:
        """Let the next iteration go on where ``state`` was saved; ``ValueError`` if generators are missing."""
        if "made" in state:
            sources.check_own_states(state["made"]["own"])
            self.loaded = state
        else:
            sources.set_own_states(state["own"])
            self.forget()

    def forget(self) -> None:
        """Begin a new order next."""
        self.loaded = self.newest = None


class IndexOrder:
    """Stands in for the sampler of an iterator, which begins an iteration over it once, or for each epoch."""

    def __init__(self, sources: OrderSources, position: Position) -> None:
        self.sources = sources  # its sampler, and what the order depends on
        self._position = position
        self.iteration: Iteration | None = None

    def __iter__(self) -> Iteration:
        self.iteration = self._position.newest = Iteration(self.sources, self._position.loaded)
        return self.iteration

    def __len__(self) -> int:
        return len(self.sources.sampler)


class _CountingIterator:
    """Mixed in before the class of an iterator: what it has handed out is known when it is gone, too."""

    _index_sampler: IndexOrder

    def __next__(self) -> Any:
        iteration = self._index_sampler.iteration
        assert iteration is not None
        try:
            batch = super().__next__()  # type: ignore[misc]
        except StopIteration:
            iteration.end()
            raise
        iteration.count()
        return batch


_counting_classes: dict[type[Any], type[Any]] = {}


def count_batches(iterator: Any) -> Any:
    """Let an iterator of torch's that was made with an :class:`IndexOrder` count what it hands out; returns it."""
    kind = type(iterator)
    if kind not in _counting_classes:
        attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _counting_classes[kind] = type(kind.__name__, (_CountingIterator, kind), attributes)
    iterator.__class__ = _counting_classes[kind]
    return iterator


def stop_counting(iterator: Any) -> None:
    """Give a persistent iterator its sampler and class back; ``None`` is passed over."""
    if type(iterator) in _counting_classes.values():
        set_index_sampler(iterator, index_sampler_of(iterator).sources.sampler)
        iterator.__class__ = type(iterator).__bases__[-1]


# A loader changes its class only. Data that is skipped is not loaded, only its indices are drawn again. It costs 33 kB
# for each loader in a checkpoint, and the time to draw these. Not the same as without a break: the random numbers that
# the dataset draws in workers, which start anew, and a sampler that draws from a *global* generator for each batch
# (those of torch draw at the start, or from one of their own), if anything else draws from it as well. Of several ranks
# one state is saved: the samplers of all must go by the same generators, or by seed and epoch (``DistributedSampler``).

_POSITION = "_lightning_vram_position"  # on instances; Lightning passes over names that begin with an underscore
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
        "this version of torch iterates over loaders differently": not can_be_opened(),
        "its class defines its own iteration": not iterates_as_stock(type(loader)),
        "its sampler has no length": not _has_length(loader),
        "in_order=False yields batches in any order": loader.num_workers > 0 and not getattr(loader, "in_order", True),
        "its workers are already running (persistent_workers)": staying_iterator(loader) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def make_stateful(loader: DataLoader[Any]) -> None:
    """Let :func:`loader_state` know where ``loader`` is. Copies and pickles of it are plain loaders.

    After :func:`load_loader_state` the next ``iter(loader)``, and only that, goes on where the state was saved, in
    the same order. A state that was saved before or after an iteration begins a new order; generators that the
    loader or its samplers have for themselves go on as they would have.

    The epoch of a distributed sampler is part of the order that is gone on with. That of a new order is not: with
    workers it is drawn in ``iter()``, so the epoch has to be set before (Lightning 2.6 sets it after, when it resumes).

    Args:
        loader: One that :func:`can_be_stateful` accepts. Again does nothing.

    Raises:
        TypeError: If ``loader`` is no ``DataLoader``.
        ValueError: If it cannot be stateful.
    """
    reason = can_be_stateful(loader)
    if reason:
        given: type = type(loader)
        error = ValueError if issubclass(given, DataLoader) else TypeError
        raise error(f"loader {given.__name__} cannot be made stateful: {reason}.")
    if not isinstance(loader, _StatefulLoader):
        loader.__class__ = _stateful_class(type(loader))


def remove_state(loader: DataLoader[Any]) -> None:
    """Undo :func:`make_stateful`. Twice does nothing."""
    if type(loader) in _stateful_classes.values():
        vars(loader).pop(_POSITION, None)
        stop_counting(staying_iterator(loader))
        loader.__class__ = type(loader).__bases__[-1]


def loader_state(loader: DataLoader[Any], *, epoch_has_ended: bool | None = None) -> State:
    """Return the place of the newest iteration; tensors, numbers, strings, lists and dictionaries only.

    A function, for Lightning would put the state of a loader that has a ``state_dict`` into every checkpoint by itself,
    and refuse to load it where the loader has none.

    Args:
        loader: One that was made stateful.
        epoch_has_ended: Whether the state begins a new order. ``False``: not even where the loader has ended, which a
            longer one next to it, or after it, has not. ``True``: in any case, as an epoch may end before the loader
            does (``limit_train_batches``). ``None``: where the loader has ended.
    """
    return _position(loader).state(_sources(loader), epoch_has_ended=epoch_has_ended)


def load_loader_state(loader: DataLoader[Any], state: State) -> None:
    """Let the next iteration, and only that, go on where ``state`` was saved; ``ValueError`` if it cannot."""
    most = len(loader) if state.get("has_ended") else max(len(loader), 1) - 1
    if state["num_batches"] > most:
        raise ValueError(
            f"load_loader_state(loader, state) begins after {state['num_batches']} batches, the loader has "
            f"{len(loader)}. Create the loader as it was when the state was saved."
        )
    _position(loader).load(state, _sources(loader))


def share_generators(loaders: Iterable[DataLoader[Any]]) -> bool:
    """Return whether two of ``loaders`` draw from one generator, which no state of either has as it is now."""
    generators = [id(generator) for loader in loaders for generator in _sources(loader).own_generators()]
    return len(set(generators)) < len(generators)


class _StatefulLoader(OpenLoader):
    """Mixed in before the class of a loader."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep registries and checks that the user's classes hang here from seeing ours."""

    @override
    def lightning_vram_index_sampler(self, stock: Any) -> Any:
        # Ours only for the iterator: others see the sampler they know.
        position = _position(self)
        return IndexOrder(_sources(self, stock), position) if position.makes_iterator else stock

    @override
    def lightning_vram_iterator(self, make: Callable[[], Any]) -> Any:
        position = _position(self)
        position.makes_iterator = True
        try:
            iterator = make()
        finally:
            position.makes_iterator = False
        return count_batches(iterator)

    def __iter__(self) -> Any:
        iterator = super().__iter__()
        _position(self).loaded = None  # not before: torch begins iterations twice where there are workers
        return iterator

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        if rest and isinstance(rest[0], dict):
            rest[0] = {name: value for name, value in rest[0].items() if name != _POSITION}
        plain = type(self).__bases__[-1]
        arguments = tuple(plain if argument is type(self) else argument for argument in arguments)
        if make is getattr(copyreg, "__newobj__", None) and len(arguments) == 1:
            # pickle insists that __newobj__ makes the class of the very object; its elder does the same work
            make, arguments = copyreg._reconstructor, (plain, object, None)  # type: ignore[attr-defined]
        return make, arguments, *rest


def _stateful_class(original: type[Any]) -> type[Any]:
    if original not in _stateful_classes:
        attributes = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        metaclass: Any = type(original)
        _stateful_classes[original] = metaclass(original.__name__, (_StatefulLoader, original), attributes)
    return _stateful_classes[original]


def _position(loader: DataLoader[Any]) -> Position:
    # Made when it is needed: Lightning makes loaders of the same class anew, to put a distributed sampler in.
    position: Position = vars(loader).setdefault(_POSITION, Position())
    return position


def _sources(loader: DataLoader[Any], sampler: Any = None) -> OrderSources:
    return OrderSources(index_sampler_of(loader) if sampler is None else sampler, loader.generator)


def _has_length(loader: DataLoader[Any]) -> bool:
    try:
        return len(loader) >= 0
    except TypeError:
        return False
