"""Features of a plan in a running Trainer."""

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_vram.planner.parts import Part
from lightning_vram.planner.scheme import Scheme

_LATE = ("ActivationCheckpointing", "ActivationOffload")


class PlannedParts:
    """Callbacks and plugins of a scheme, during a fit.

    Make it in a ``setup`` hook: Lightning's loop over the callbacks reaches those that are appended to the list.
    """

    def __init__(self, trainer: pl.Trainer, scheme: Scheme, more: Sequence[Callback] = ()) -> None:
        self._trainer = trainer
        self._callbacks: list[tuple[Part | None, Callback]] = [(None, callback) for callback in more]
        self._precision = trainer.strategy.precision_plugin
        self.scheme = scheme
        for part in scheme.parts:
            if part.place == "plugins":
                trainer.strategy.precision_plugin = part.make()
            else:
                self._callbacks.append((part, part.make()))
        self._list.extend(callback for _, callback in self._callbacks)

    @property
    def _list(self) -> list[Callback]:
        return self._trainer.callbacks  # type: ignore[attr-defined, no-any-return]

    def change(self, scheme: Scheme) -> None:
        """Switch to another scheme: between two steps, or two tries of one."""
        trainer, module = self._trainer, self._trainer.lightning_module
        wanted = [part for part in scheme.parts if part.name in _LATE]
        for part, callback in list(self._callbacks):
            if part is not None and part.name in _LATE and part not in wanted:
                callback.teardown(trainer, module, "fit")
                self._list.remove(callback)
                self._callbacks.remove((part, callback))
        known = [part for part, _ in self._callbacks]
        for part in wanted:
            if part not in known:
                callback = part.make()
                callback.start_late(trainer)
                self._callbacks.append((part, callback))
                self._list.append(callback)
        self.scheme = scheme

    def end(self, exception: BaseException | None = None) -> None:
        """Undo and remove all of them, at the end of a fit or after an error."""
        own, self._callbacks = [callback for _, callback in self._callbacks], []
        self._list[:] = [callback for callback in self._list if all(callback is not one for one in own)]
        self._trainer.strategy.precision_plugin = self._precision
        for callback in own:
            if exception is None:
                callback.teardown(self._trainer, self._trainer.lightning_module, "fit")
            else:
                callback.on_exception(self._trainer, self._trainer.lightning_module, exception)


def differs_late(one: Scheme, other: Scheme) -> bool:
    """Whether a running fit can switch from one scheme to the other."""
    fixed, other_fixed = ([part for part in scheme.parts if part.name not in _LATE] for scheme in (one, other))
    return fixed == other_fixed
