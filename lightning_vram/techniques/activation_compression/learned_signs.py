"""Learn which activations keep their signs in vain: what follows them saves the values as well, in each step.

A wrong guess costs bytes, as many as plain autograd would have kept, and never a gradient.
"""

import torch
from torch import Tensor

from lightning_vram.core.tensors.by_storage import ByStorage
from lightning_vram.core.tensors.versions import version_of

_Place = tuple[int, torch.Size]  # number of the save of signs in a run, and its shape


class LearnedSigns:
    """Remembers, from run to run, the places where the signs were given up."""

    def __init__(self) -> None:
        self._in_vain: set[_Place] = set()
        self._now_in_vain: set[_Place] = set()
        self._asked: ByStorage[tuple[int, _Place]] = ByStorage()  # of this run: version and place
        self._num_saves = 0

    def was_asked(self, tensor: Tensor) -> bool:
        """Whether the signs of ``tensor``, as it is now, were wanted before: that save failed, and this is another."""
        return self._find(tensor) is not None

    def is_worth_it(self, tensor: Tensor) -> bool:
        """Whether to keep the signs of ``tensor``, which an activation is saving; to be asked once for each."""
        self._num_saves += 1
        place = self._num_saves, tensor.shape
        self._asked.note(tensor, (version_of(tensor), place))
        return place not in self._in_vain

    def note_values(self, tensor: Tensor) -> None:
        """Note that somebody saves ``tensor``, and wants its values."""
        place = self._find(tensor)
        if place is not None:
            self._now_in_vain.add(place)

    def end_run(self) -> None:
        """Use what was learned from now on."""
        self._in_vain, self._now_in_vain = self._now_in_vain, set()
        self._asked.clear()
        self._num_saves = 0

    def _find(self, tensor: Tensor) -> _Place | None:
        asked = self._asked.find(tensor)
        return asked[1] if asked is not None and asked[0] == version_of(tensor) else None
