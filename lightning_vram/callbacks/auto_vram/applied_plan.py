"""Features of a plan in a running Trainer."""

import time
from collections.abc import Sequence
from dataclasses import replace

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram.memory.device.accelerators import PeakWatch
from lightning_vram.planner.scheme import Found, Part, Scheme, find_measured

_LATE = ("ActivationCheckpointing", "ActivationOffload")


class AppliedPlan:
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


def can_switch(one: Scheme, other: Scheme) -> bool:
    """Whether a running fit can switch from one scheme to the other."""
    fixed, other_fixed = ([part for part in scheme.parts if part.name not in _LATE] for scheme in (one, other))
    return fixed == other_fixed


_FIRST_BATCH, _LAST_BATCH = 3, 6  # in the first two, optimizers create their state and callbacks make their plans
_WORTH_A_CHANGE = 0.97
_NO_WAIT = 1.001  # step time by computation: sums of seconds differ in the last digits


class FirstSteps:
    """Measures some batches after the first ones. The host waits for the device twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = PeakWatch(device)
        self._num_batches = 0
        self._started = 0.0

    def begin_batch(self) -> None:
        """Note that a batch begins."""
        if self._num_batches == _FIRST_BATCH:
            self._synchronize()
            self._watch.restart()
            self._started = time.perf_counter()

    def end_batch(self) -> tuple[float, int] | None:
        """Note that a batch has ended; return the seconds of one on average and the peak of reserved bytes, once."""
        self._num_batches += 1
        if self._num_batches != _LAST_BATCH:
            return None
        self._synchronize()
        seconds = (time.perf_counter() - self._started) / (_LAST_BATCH - _FIRST_BATCH)
        return seconds, self._watch.read().peak_reserved_bytes

    def _synchronize(self) -> None:
        torch.get_device_module(self._device).synchronize(self._device)


def faster_scheme(found: Found, scheme: Scheme, budget_bytes: int, seconds: float) -> Scheme | None:
    """Return a faster scheme by the measured step, that a running fit can switch to; ``None`` if none is."""
    now = find_measured(scheme, found.tried)
    if now is None or now.seconds > _NO_WAIT * now.time.compute:
        return None
    factor = seconds / now.seconds  # of computation; copies keep their time, since PCIe bandwidth was measured
    fitting = [
        replace(one, time=one.time.computed_slower(factor))
        for one in found.tried
        if one.needed_bytes <= budget_bytes and can_switch(one.scheme, scheme)
    ]
    fastest = min(fitting, key=lambda one: one.seconds, default=now)
    return fastest.scheme if fastest.seconds < _WORTH_A_CHANGE * seconds else None
