"""Learn which activations keep their signs in vain: what follows them saves the values as well, in each step.

A wrong guess costs bytes, as many as plain autograd would have kept, and never a gradient.
"""

import weakref

import torch
from torch import Tensor

from lightning_vram.techniques.versions import storage_address, version_of

_Place = tuple[int, torch.Size]  # number of the save of signs in a run, and its shape


class LearnedSigns:
    """Remembers, from run to run, the places where the signs were given up."""

    def __init__(self) -> None:
        self._in_vain: set[_Place] = set()
        self._now_in_vain: set[_Place] = set()
        self._asked: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, _Place]] = {}  # of this run, by address
        self._num_saves = 0

    def was_asked(self, tensor: Tensor) -> bool:
        """Whether the signs of ``tensor``, as it is now, were wanted before: that save failed, and this is another."""
        return self._find(tensor, version_of(tensor)) is not None

    def is_worth_it(self, tensor: Tensor) -> bool:
        """Whether to keep the signs of ``tensor``, which an activation is saving; to be asked once for each."""
        self._num_saves += 1
        place = self._num_saves, tensor.shape
        self._asked[storage_address(tensor)] = weakref.ref(tensor.untyped_storage()), version_of(tensor), place
        return place not in self._in_vain

    def note_values(self, tensor: Tensor) -> None:
        """Note that somebody saves ``tensor``, and wants its values."""
        place = self._find(tensor, version_of(tensor))
        if place is not None:
            self._now_in_vain.add(place)

    def end_run(self) -> None:
        """Use what was learned from now on."""
        self._in_vain, self._now_in_vain = self._now_in_vain, set()
        self._asked.clear()
        self._num_saves = 0

    def _find(self, tensor: Tensor, version: int) -> _Place | None:
        storage, noted, place = self._asked.get(storage_address(tensor), (None, 0, None))
        return place if storage is not None and storage() is not None and noted == version else None
