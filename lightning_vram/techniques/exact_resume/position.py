"""Where a loader is."""

from typing import Any

from lightning_vram.core.random_state.generators import State
from lightning_vram.private_names.torch.data import index_sampler_of, set_index_sampler
from lightning_vram.techniques.exact_resume.samplers import Iteration, OrderSources


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


_classes: dict[type[Any], type[Any]] = {}


def count_batches(iterator: Any) -> Any:
    """Let an iterator of torch's that was made with an :class:`IndexOrder` count what it hands out; returns it."""
    kind = type(iterator)
    if kind not in _classes:
        attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _classes[kind] = type(kind.__name__, (_CountingIterator, kind), attributes)
    iterator.__class__ = _classes[kind]
    return iterator


def stop_counting(iterator: Any) -> None:
    """Give a persistent iterator its sampler and class back; ``None`` is passed over."""
    if type(iterator) in _classes.values():
        set_index_sampler(iterator, index_sampler_of(iterator).sources.sampler)
        iterator.__class__ = type(iterator).__bases__[-1]
