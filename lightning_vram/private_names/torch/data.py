"""How a ``DataLoader`` begins an iteration, and what draws the indices in it."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch.utils.data import DataLoader

_NEEDED = ("_index_sampler", "_get_iterator")


class OpenLoader(DataLoader[Any]):
    """A loader that is asked for its indices and its iterators; the names are such that no user's class has them."""

    def lightning_vram_index_sampler(self, stock: Any) -> Any:
        """Return what draws the indices, instead of ``stock``."""
        return stock

    def lightning_vram_iterator(self, make: Callable[[], Any]) -> Any:
        """Return a new iterator; ``make`` makes the stock one."""
        return make()

    @property
    def _index_sampler(self) -> Any:
        return self.lightning_vram_index_sampler(super()._index_sampler)

    def _get_iterator(self) -> Any:
        return self.lightning_vram_iterator(super()._get_iterator)


def can_be_opened() -> bool:
    """Whether loaders of this version of torch ask an :class:`OpenLoader`."""
    return all(hasattr(DataLoader, name) for name in _NEEDED)


def iterates_as_stock(kind: type) -> bool:
    """Whether a class of loaders makes its iterators as ``DataLoader`` does."""
    names = ("__iter__", "_get_iterator")
    return all(getattr(kind, name, None) is getattr(DataLoader, name, None) for name in names)


def staying_iterator(loader: DataLoader[Any]) -> Any | None:
    """Return the iterator whose workers stay (``persistent_workers``), once there is one."""
    return getattr(loader, "_iterator", None)


index_sampler_of: Callable[[Any], Any] = attrgetter("_index_sampler")
"""Return what draws the indices in a loader, or in an iterator of one."""


def set_index_sampler(iterator: Any, sampler: Any) -> None:
    """Let an iterator of a loader draw its indices from ``sampler``."""
    iterator._index_sampler = sampler
