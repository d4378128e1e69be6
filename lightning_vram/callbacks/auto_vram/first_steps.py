"""Correct a plan once, by its first steps."""

import time
from dataclasses import dataclass, replace

import torch

from lightning_vram.callbacks.auto_vram.parts import differs_late
from lightning_vram.memory.device.allocator import PeakWatch
from lightning_vram.planner.measured import Found
from lightning_vram.planner.scheme import Scheme

_FIRST, _LAST = 3, 6  # batches: in the first two, optimizers create their state and callbacks make their plans
_WORTH_A_CHANGE = 0.97
_NO_WAIT = 1.001  # step time by computation: sums of seconds differ in the last digits


@dataclass(frozen=True)
class Took:
    """What a batch needed."""

    seconds: float  # on average
    reserved_bytes: int  # peak


class FirstSteps:
    """Measures some batches after the first ones. The host waits for the device twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = PeakWatch(device)
        self._num_batches = 0
        self._started = 0.0

    def begin_batch(self) -> None:
        """Note that a batch begins."""
        if self._num_batches == _FIRST:
            self._synchronize()
            self._watch.restart()
            self._started = time.perf_counter()

    def end_batch(self) -> Took | None:
        """Note that a batch has ended; return the measurement, once."""
        self._num_batches += 1
        if self._num_batches != _LAST:
            return None
        self._synchronize()
        seconds = (time.perf_counter() - self._started) / (_LAST - _FIRST)
        return Took(seconds, self._watch.read().peak_reserved_bytes)

    def _synchronize(self) -> None:
        torch.get_device_module(self._device).synchronize(self._device)


def better(found: Found, scheme: Scheme, budget_bytes: int, seconds: float) -> Scheme | None:
    """Return a faster scheme by the measured step, that a running fit can switch to; ``None`` if none is."""
    now = next((one for one in found.tried if one.scheme == scheme), None)
    if now is None or now.seconds > _NO_WAIT * now.time.compute:
        return None
    factor = seconds / now.seconds  # of computation; copies keep their time, since PCIe bandwidth was measured
    fitting = [
        replace(one, time=one.time.computed_slower(factor))
        for one in found.tried
        if one.needed_bytes <= budget_bytes and differs_late(one.scheme, scheme)
    ]
    fastest = min(fitting, key=lambda one: one.seconds, default=now)
    return fastest.scheme if fastest.seconds < _WORTH_A_CHANGE * seconds else None
