"""Let a plain ``DataLoader`` save where it is in an epoch and go on from there, with the samples that are left.

A run that is resumed in the middle of an epoch starts with its first samples again, where the loader has no
``state_dict``. The loader stays what it is but for its class, and the data that is skipped is not loaded: only its
indices are drawn again.

What it costs: 33 kB for each loader in a checkpoint, and the time to draw the indices that are skipped.

What is not the same as without a break: the random numbers that the dataset draws in workers, which start anew, and a
sampler that draws from a *global* generator for each batch (those of torch draw at the start, or from one of their
own), if anything else draws from it as well. Of several ranks one state is saved: the samplers of all must go by the
same generators, or by seed and epoch as ``DistributedSampler`` does.
"""

import copyreg
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_vram.core.random_state.generators import State
from lightning_vram.private_names.torch.data import (
    OpenLoader,
    can_be_opened,
    index_sampler_of,
    iterates_as_stock,
    staying_iterator,
)
from lightning_vram.techniques.exact_resume.position import IndexOrder, Position, count_batches, stop_counting
from lightning_vram.techniques.exact_resume.samplers import OrderSources

_POSITION = "_lightning_vram_position"  # on instances; Lightning passes over names that begin with an underscore
_classes: dict[type[Any], type[Any]] = {}  # made once, so that types compare


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
    if type(loader) in _classes.values():
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
    if original not in _classes:
        attributes = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        metaclass: Any = type(original)
        _classes[original] = metaclass(original.__name__, (_StatefulLoader, original), attributes)
    return _classes[original]


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
