"""Decide whether it is worth looking for a cast that an earlier use of the weight has made."""

import torch
from torch import Tensor

from lightning_vram.techniques.mixed_precision.shared_casts import SharedCasts

_LONGEST_WAIT = 64  # steps


class Sharing:
    """Whether casts for some modules, which have a weight in common, are looked for: ``is_idle`` if not.

    They are in the first step, and for good once one was found. After a step without, they are left alone until there
    were several calls in a step. If none is found then either (casts of earlier micro-batches are dead), the next try
    comes after twice as many such steps.

    Args:
        casts: To look in.
    """

    __slots__ = ("_casts", "_has_shared", "_num_steps_left", "_wait", "is_idle", "num_calls")

    def __init__(self, casts: SharedCasts) -> None:
        self._casts = casts
        self._has_shared = False
        self._wait = self._num_steps_left = 1
        self.is_idle = False
        self.num_calls = 0  # since the last step, that autograd records under autocast

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """See :meth:`SharedCasts.cast`."""
        cast, is_shared = self._casts.cast(weight, dtype)
        self._has_shared |= is_shared
        return cast

    def settle(self) -> None:
        """Decide for the next step."""
        num_calls, self.num_calls = self.num_calls, 0
        if self._has_shared or num_calls < (2 if self.is_idle else 1):
            return
        has_tried = num_calls > 1 and not self.is_idle  # one call in a step finds nothing, but the next may have more
        self._num_steps_left = 0 if has_tried else self._num_steps_left - 1
        if self._num_steps_left:
            return
        self.is_idle = not self.is_idle
        self._num_steps_left = self._wait
        if self.is_idle:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
