"""A plain DataLoader that knows its position, so that a run resumes with the next batch. May import: core, memory.

A loader changes its class only. An order cannot be saved, since samplers may draw it bit by bit: what it was drawn from
is. Data that is skipped is not loaded, only its indices are drawn again. It costs some 16 kB for each loader in a
checkpoint. Random numbers that the dataset draws in workers start anew. Of several ranks one state is saved: the
samplers of all must go by the same generators, or by seed and epoch (``DistributedSampler``).
"""

import copyreg
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, Sampler
from typing_extensions import override

from lightning_vram.core.random_state import State, read_global_states, source_of, with_global_states
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

    Samplers are asked for an iterator with the first batch, or in ``iter()`` if there are workers. The epoch of a
    distributed sampler has to be set before (Lightning 2.6 sets it after ``iter()``, when it resumes); when an order is
    gone on with, it is that of the order.

    Args:
        loader: One that :func:`can_be_stateful` accepts. Again does nothing.

    Raises:
        ValueError: If it cannot be stateful, or a sampler has a generator that is not a ``torch.Generator``.
    """
    reason = can_be_stateful(loader)
    original: type[Any] = type(loader)
    if reason:
        raise ValueError(f"loader {original.__name__} cannot be made stateful: {reason}.")
    if isinstance(loader, _StatefulLoader):
        return
    for sampler in _find_samplers(getattr(loader, _sampler_name(loader))):
        for value in _attributes(sampler).values():
            if source_of(value) is not None and not isinstance(value, Generator):
                raise ValueError(
                    f"A run with the sampler {type(sampler).__name__} cannot be resumed exactly: it draws from a "
                    f"{type(value).__name__} of its own. Use a torch.Generator, or the global generator, in its place."
                )
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
    if newest is not None and newest.drawn_from is not None:
        return newest.drawn_from | {"num_batches": newest.num_batches}
    # The next order is not drawn yet: of what it depends on, nobody else would save these.
    return {"num_batches": 0, "own": order.own_states() if newest is None else newest.own}


def load_loader_state(loader: DataLoader[Any], state: State) -> None:
    """Let the next iteration, and only that, go on where ``state`` was saved; ``ValueError`` if it cannot."""
    order = _order(loader)
    num_generators = len(order.generators())
    if state["num_batches"] > len(loader) or len(state["own"]) != num_generators:
        raise ValueError(
            f"load_loader_state(loader, state) begins after {state['num_batches']} batches with {len(state['own'])} "
            f"generators, the loader has {len(loader)} with {num_generators}. "
            "Create the loader as it was when the state was saved."
        )
    order.set_own_states(state["own"])
    order.loaded, order.newest = state if "global" in state else None, None


def share_generators(loaders: Iterable[DataLoader[Any]]) -> bool:
    """Return whether two of ``loaders`` draw from one generator, which no state of either has as it is now."""
    generators = [generator for loader in loaders for generator in _order(loader).generators()]
    return len(set(generators)) < len(generators)


class _Order:
    """What the order of a loader depends on, and its newest iteration; stands in for the sampler of its iterators."""

    # It refers to no iterator, which would keep workers alive.

    def __init__(self, sampler: Any, generator: Generator | None) -> None:
        self.sampler = sampler  # or batch sampler
        self._generator = generator  # that of the loader, which seeds its workers
        self.loaded: State | None = None  # for the next iteration
        self.newest: _Iteration | None = None

    def __iter__(self) -> Iterator[Any]:
        self.newest = _Iteration(self)
        return self.newest.indices(self)

    def __len__(self) -> int:
        return len(self.sampler)

    def note(self) -> State:
        """Return what an order that is drawn now depends on: generators and, of distributed samplers, the epoch."""
        epochs = [getattr(sampler, "epoch", None) for sampler in self._with_epochs()]
        return {"epochs": epochs, "own": self.own_states(), "global": read_global_states()}

    def restore(self, note: State) -> None:
        """Set all but the global generators to what they were at the note."""
        for sampler, epoch in zip(self._with_epochs(), note["epochs"], strict=False):
            if epoch is not None:
                sampler.set_epoch(epoch)  # first: it may seed a generator
        self.set_own_states(note["own"])

    def own_states(self) -> list[Any]:
        return [generator.get_state() for generator in self.generators()]

    def set_own_states(self, states: list[Any]) -> None:
        for generator, state in zip(self.generators(), states, strict=True):
            generator.set_state(state.cpu())  # a checkpoint may have been read to another device

    def generators(self) -> list[Generator]:
        """Return the generators that the loader and its samplers have for themselves."""
        values = [value for sampler in _find_samplers(self.sampler) for value in _attributes(sampler).values()]
        return list(dict.fromkeys(value for value in [self._generator, *values] if isinstance(value, Generator)))

    def _with_epochs(self) -> list[Any]:
        return [sampler for sampler in _find_samplers(self.sampler) if hasattr(sampler, "set_epoch")]


def _find_samplers(sampler: object) -> list[Any]:
    """Return a sampler and those that it is made of, always in the same order."""
    found: dict[int, object] = {}
    waiting = [sampler]
    while waiting:
        current = waiting.pop()
        if id(current) in found:
            continue
        found[id(current)] = current
        for name, value in _attributes(current).items():
            if isinstance(value, (list, tuple)):  # of samplers, or of very many indices
                waiting += value if value and isinstance(value[0], Sampler) else []
                continue
            # What holds a sampler may be no sampler itself: Lightning's DistributedSamplerWrapper has one in a dataset.
            holds_one = any(isinstance(part, Sampler) for part in _attributes(value).values())
            if name.endswith("sampler") or isinstance(value, Sampler) or holds_one:
                waiting.append(value)
    return list(found.values())


def _attributes(value: object) -> dict[str, object]:
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}


class _Iteration:
    """One iteration over a sampler, and how many batches of it were handed out: with workers, fewer than drawn."""

    def __init__(self, order: _Order) -> None:
        self.own = order.own_states()
        self.drawn_from = order.loaded
        self.num_batches: int = 0 if order.loaded is None else order.loaded["num_batches"]

    def indices(self, order: _Order) -> Iterator[Any]:
        """Yield the indices that are left."""
        if self.drawn_from is None:
            self.drawn_from = order.note()
            yield from order.sampler
            return
        num_skipped = self.num_batches
        order.restore(self.drawn_from)
        with with_global_states(self.drawn_from["global"]):
            every = iter(order.sampler)
            last = deque(islice(every, max(num_skipped, 1)), maxlen=1)  # nothing is drawn before the first
        yield from () if num_skipped else last
        # A sampler that draws from a global generator for each batch goes on with the numbers of the run.
        yield from every

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
