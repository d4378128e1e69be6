"""Iterate over a sampler, note what its order was drawn from, and resume in the middle of such an order."""

from collections.abc import Iterator
from typing import Any

from torch import Generator
from torch.utils.data import Sampler

from lightning_vram.core.random_state.generators import (
    State,
    is_generator,
    read_global_states,
    read_state,
    with_global_states,
    write_state,
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
