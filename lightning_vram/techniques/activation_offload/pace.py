"""Limit offloading so that a step takes at most a given multiple of its time without waiting for copies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_vram.core.host.copy_notes import TO_DEVICE, TO_HOST
from lightning_vram.core.host.copy_times import WAIT_FOR_FETCHING, WAIT_FOR_SENDING, CopyTimes
from lightning_vram.techniques.activation_offload.places import OffloadPlaces

_NUM_MEASURED = 2  # steps, of which the quicker one counts: others may use the machine
_NUM_STEPS_UNWATCHED = 100  # after the waits were found to be short enough
_TOLERANCE = 0.01  # of a step, for waits that no limit explains


@dataclass(frozen=True)
class OffloadMeasures:
    """What a step with offloading was measured to take.

    Args:
        to_host_bytes_per_second: Of a copy while it runs.
        to_device_bytes_per_second: The same on the way back.
        forward_seconds: Of its first forward, without waits.
        backward_seconds: Of the backward up to the last tensor that was asked for, without waits.
        forward_wait_seconds: What it waited for room, which copies to the host held.
        backward_wait_seconds: What it waited for tensors to be there again.
        saved_bytes: What the forward saved and may travel, whether it did or not.
        travelling_share: Of a byte that is sent away, on the bus: half of one where float32 travels in bfloat16.
        copies_run_beside: Whether copies run beside the computation; it stands still for each copy if not.
    """

    to_host_bytes_per_second: float
    to_device_bytes_per_second: float
    forward_seconds: float
    backward_seconds: float
    forward_wait_seconds: float
    backward_wait_seconds: float
    saved_bytes: int
    travelling_share: float
    copies_run_beside: bool

    @property
    def compute_seconds(self) -> float:
        """Forward and backward without waits."""
        return self.forward_seconds + self.backward_seconds

    @property
    def wait_seconds(self) -> float:
        """What the computation waited for copies."""
        return self.forward_wait_seconds + self.backward_wait_seconds

    def excess_seconds(self, max_slowdown: float) -> float:
        """Return how much longer than allowed the computation waited; negative if it did not."""
        return self.wait_seconds - (max_slowdown - 1) * self.compute_seconds

    def excess_bytes(self, max_slowdown: float) -> int:
        """Return how much the bus carried in the time that the computation waited longer than allowed."""
        waited = self.forward_wait_seconds * self.to_host_bytes_per_second
        waited += self.backward_wait_seconds * self.to_device_bytes_per_second
        excess = max(0.0, self.excess_seconds(max_slowdown))
        return round(waited / self.travelling_share * excess / self.wait_seconds) if excess else 0

    def most_bytes(self, max_slowdown: float) -> int:
        """Return how many bytes of a forward can be offloaded, at most what is saved."""
        allowed = (max_slowdown - 1) * self.compute_seconds
        beside = float(self.copies_run_beside)
        forward, backward = beside * self.forward_seconds, beside * self.backward_seconds
        to_host = self.to_host_bytes_per_second / self.travelling_share
        to_device = self.to_device_bytes_per_second / self.travelling_share
        # It waits for what does not travel in a forward, or does not in a backward, or for the sum of both.
        bounds = (
            (allowed + forward) * to_host,
            (allowed + backward) * to_device,
            (allowed + forward + backward) / (1 / to_host + 1 / to_device),
        )
        return int(min(self.saved_bytes, *bounds))


class OffloadPace:
    """Measures steps, and sets how much of a forward may be offloaded; with ``None`` nothing is measured.

    Offloading everything can make a step slower and its peak higher at once: copies queue up and hold device memory.
    The first steps are measured on the device's own timeline and a limit is set, which changes again only if the
    computation still waits too long: memory would jump with it.
    """

    def __init__(self, max_slowdown: float | None) -> None:
        self._max_slowdown = max_slowdown
        self._step: _MeasuredStep | None = None
        self._seen: list[OffloadMeasures] = []
        self._num_unwatched = 0  # steps still to come
        self._has_limit = False
        self.measures: OffloadMeasures | None = None

    def begin(self, places: OffloadPlaces, most_bytes: int | None) -> int | None:
        """Begin a step; returns how much of a forward may travel from now on."""
        step, self._step = self._step, None
        measures = step.finish() if step is not None else None
        if measures is not None:
            self._seen.append(measures)
        elif step is not None and self._has_limit:  # so low that nothing travels: there is nothing to watch
            self._num_unwatched = _NUM_STEPS_UNWATCHED
        if len(self._seen) == _NUM_MEASURED:
            most_bytes = self._decide(most_bytes)
        if self._num_unwatched > 0:
            self._num_unwatched -= 1
        elif self._max_slowdown is not None:
            self._step = _MeasuredStep.begin(places)
        return most_bytes

    def end_forward(self, sent_bytes: int, kept_bytes: int) -> None:
        """The step's first forward is over, in which so much was sent away and so much stayed."""
        if self._step is not None:
            self._step.end_forward(sent_bytes, kept_bytes)

    def note_asked(self) -> None:
        """The backward was handed what it asked for."""
        if self._step is not None:
            self._step.note_asked()

    def _decide(self, most_bytes: int | None) -> int | None:
        assert self._max_slowdown is not None
        measures = self.measures = min(self._seen, key=lambda seen: seen.compute_seconds + seen.wait_seconds)
        self._seen.clear()
        allowed = self._max_slowdown + _TOLERANCE
        if measures.excess_seconds(allowed) <= 0:
            self._num_unwatched = _NUM_STEPS_UNWATCHED
            return most_bytes
        sent = measures.saved_bytes if most_bytes is None else min(most_bytes, measures.saved_bytes)
        if self._has_limit:  # and still waits too long: for a burst, say, which the rates do not show
            sent -= measures.excess_bytes(allowed)
        self._has_limit = True
        return max(0, min(sent, measures.most_bytes(self._max_slowdown)))


class _MeasuredStep:
    """A forward, and the backward after it, of one device."""

    def __init__(self, times: CopyTimes, stop: Callable[[], None], *, is_beside: bool) -> None:
        self._times = times
        self._stop = stop
        self._is_beside = is_beside
        self._saved_bytes = 0
        self._travelling_share = 1.0
        self._start = times.clock.mark()
        self._forward_end: Any = None
        self._last_asked: Any = None

    @classmethod
    def begin(cls, places: OffloadPlaces) -> "_MeasuredStep | None":
        """Begin to measure, if something travelled before: the first step is no step like others."""
        copies = places.copies
        clock = copies.make_clock() if copies is not None else None
        if copies is None or clock is None:
            return None
        times = copies.times = CopyTimes(clock)
        return cls(times, lambda: setattr(copies, "times", None), is_beside=places.copies_run_beside)

    def end_forward(self, sent_bytes: int, kept_bytes: int) -> None:
        if self._forward_end is None:
            self._saved_bytes = sent_bytes + kept_bytes
            self._travelling_share = self._times.num_bytes(TO_HOST) / sent_bytes if sent_bytes else 1.0
            self._forward_end = self._times.clock.mark()

    def note_asked(self) -> None:
        self._last_asked = self._times.clock.mark()

    def finish(self) -> OffloadMeasures | None:
        """Stop measuring; returns what was found, ``None`` if nothing travelled there and back. Waits for the step."""
        self._stop()
        times, seconds = self._times, self._times.clock.seconds
        sending, fetching = times.seconds(TO_HOST), times.seconds(TO_DEVICE)
        if self._forward_end is None or self._last_asked is None or min(sending, fetching) <= 0:
            return None
        wait_forward = times.seconds(WAIT_FOR_SENDING) if self._is_beside else sending
        wait_backward = times.seconds(WAIT_FOR_FETCHING) if self._is_beside else fetching
        return OffloadMeasures(
            to_host_bytes_per_second=times.num_bytes(TO_HOST) / sending,
            to_device_bytes_per_second=times.num_bytes(TO_DEVICE) / fetching,
            forward_seconds=max(0.0, seconds(self._start, self._forward_end) - wait_forward),
            backward_seconds=max(0.0, seconds(self._forward_end, self._last_asked) - wait_backward),
            forward_wait_seconds=wait_forward,
            backward_wait_seconds=wait_backward,
            saved_bytes=self._saved_bytes,
            travelling_share=self._travelling_share,
            copies_run_beside=self._is_beside,
        )
