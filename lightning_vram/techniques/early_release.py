"""What is kept for nothing: gradients after a step, and cyclic garbage. May import: core, memory."""

import gc
import os
from collections.abc import Iterable

from torch import Tensor

from lightning_vram.core.patching import HeldSetting
from lightning_vram.memory.storages import iterate_storages
from lightning_vram.private_names.torch import storage_key

_automatic = HeldSetting(gc.isenabled, lambda is_automatic: (gc.enable if is_automatic else gc.disable)(), value=False)
_held: set[int] = set()

if hasattr(os, "register_at_fork"):  # workers of data loaders are forked in training: no steps to collect after
    os.register_at_fork(after_in_child=lambda: gc.enable() if _held else None)


class PacedCollection:
    """Collects after every n-th step; nothing collects by itself until :meth:`end`. Begins with a collection.

    Automatic collections come at different moments on each rank, and all others wait for that rank in the next
    collective. They count objects, not bytes: a cycle that holds a tensor may live for many steps. Prior art:
    ``GarbageCollection`` of torchtitan, ``ScheduledGarbageCollector`` of Composer.
    """

    def __init__(self, every_n_steps: int, step: int) -> None:
        self._every_n_steps = every_n_steps
        self._num_periods = step // every_n_steps
        self._is_holding = False
        self.resume()
        gc.collect()

    def note_step(self, step: int) -> None:
        """Collect if an n-th step was made since the last call. Several steps may have been made, or none."""
        num_periods = step // self._every_n_steps
        if num_periods != self._num_periods:
            gc.collect()
        self._num_periods = num_periods

    def resume(self) -> None:
        """Hold automatic collections off again, after :meth:`end`. Calling it again does nothing."""
        if not self._is_holding:
            _held.update({id(self)} if gc.isenabled() else ())
            _automatic.acquire()
        self._is_holding = True

    def end(self) -> None:
        """Let garbage be collected as it was before. Calling it again does nothing."""
        if self._is_holding:
            _automatic.release()
            _held.discard(id(self))
        self._is_holding = False


def gradient_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes that gradients of ``parameters`` hold: those of their storages, each counted once."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    storages = [storage for gradient in gradients for storage, _ in iterate_storages(gradient)]
    return sum({storage_key(storage): storage.nbytes() for storage in storages}.values())
