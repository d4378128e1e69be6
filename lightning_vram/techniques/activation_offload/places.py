"""Where each device offloads to, host memory or a file, and the copies in both directions."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_vram.core.host.disk import DiskRing
from lightning_vram.core.host.memory import HostArena, hidden_from_modes
from lightning_vram.core.host.transfers import (
    TO_DEVICE,
    TO_HOST,
    WAIT_FOR_FETCHING,
    WAIT_FOR_SENDING,
    Copies,
    CopyTimes,
    D2HCopy,
    H2DCopy,
    StreamCopies,
    make_copies,
)
from lightning_vram.memory.estimate.fake_tensors import fake_bytes
from lightning_vram.private_names.dispatcher import FakeTensor


class HostCopy(NamedTuple):
    """Bytes that were sent away; they are gone with this object."""

    departure: D2HCopy
    fetch: Callable[[Tensor, Any], H2DCopy]
    """Begins to copy them into a tensor that was made before some moment."""


class Place:
    """Takes flat bytes of one device and gives them back."""

    def __init__(self, arena: HostArena | None, ring: DiskRing | None, copies: Copies, like: Tensor) -> None:
        # Of this device only: copies may still read what lay there before, and copies of two devices do not wait for
        # each other. ``None`` if there is a disk.
        self.arena = arena
        self._ring = ring  # ``None`` for fake tensors, too, which would be written to the file
        self.copies = copies
        with hidden_from_modes(like):
            self._like = like.new_empty(0, dtype=torch.uint8)

    def put(self, source: Tensor, window_bytes: int) -> HostCopy:
        """Send bytes away; at most ``window_bytes`` of the device are held for copies in flight."""
        copies, like = self.copies, self._like
        if self.arena is not None:
            block = self.arena.take(source.numel())
            departure = copies.send(source, block.pieces, window_bytes)
            return HostCopy(departure, lambda target, moment: copies.fetch(block.pieces, target, moment))
        if self._ring is None:
            return HostCopy(D2HCopy(), lambda target, moment: H2DCopy())
        written = self._ring.write(source, copies, window_bytes)  # in parts: no departure stands for all
        return HostCopy(D2HCopy(), lambda target, moment: written.read(target, lambda: make_copies(like), moment))

    def make(self, num_bytes: int) -> Tensor:
        """Return memory on the device, visible to trackers of memory."""
        return self._like.new_empty(num_bytes)

    def wrap(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the bytes of ``storage`` as a flat tensor."""
        like = self._like
        if isinstance(like, FakeTensor):
            return fake_bytes(storage, like.fake_mode, like.device)
        with hidden_from_modes(like):
            return like.new_empty(0).set_(storage)


class OffloadPlaces:
    """Makes a place for each device as its tensors ask for one, and owns the memory and the file."""

    def __init__(self, disk_path: str | os.PathLike[str] | None, *, pin_memory: bool) -> None:
        self._disk_path = disk_path
        self._pins_fakes = pin_memory
        self._pin_memory = pin_memory and torch.accelerator.is_available()
        self._places: dict[tuple[torch.device, Any], Place] = {}
        self._ring: DiskRing | None = None
        self.open()

    @property
    def host_bytes(self) -> int:
        """Host memory taken; fake memory if no other was."""
        real_bytes = self._ring.staging_bytes if self._ring is not None else 0
        fake_bytes = 0
        for (_, fake_mode), place in self._places.items():
            num_bytes = place.arena.total_bytes if place.arena is not None else 0
            if fake_mode is None:
                real_bytes += num_bytes
            else:
                fake_bytes += num_bytes
        return real_bytes or fake_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the file."""
        return self._ring.total_bytes if self._ring is not None else 0

    @property
    def num_away(self) -> int:
        """Storages that are away."""
        on_disk = self._ring.num_blocks if self._ring is not None else 0
        return on_disk + sum(place.arena.num_blocks for place in self._places.values() if place.arena is not None)

    def open(self) -> None:
        """Make the file, if there is to be one and it was closed."""
        if self._disk_path is not None and self._ring is None:
            self._ring = DiskRing(self._disk_path, pin_memory=self._pin_memory)

    def close(self) -> None:
        """Give host memory and file back."""
        for place in self._places.values():
            place.copies.close()
            if place.arena is not None:
                place.arena.close()
        self._places.clear()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    @property
    def copies(self) -> Copies | None:
        """From and to the first device that is no fake; ``None`` before anything travelled."""
        return next((place.copies for (_, fake_mode), place in self._places.items() if fake_mode is None), None)

    @property
    def copies_run_beside(self) -> bool:
        """Whether copies run beside the computation, which waits for them only where it has to."""
        return self._pin_memory and isinstance(self.copies, StreamCopies)

    def settle(self) -> None:
        """Let go of what finished copies held on the device."""
        for place in self._places.values():
            place.copies.settle()

    def find(self, tensor: Tensor) -> Place:
        """Return the place for the device of ``tensor``."""
        fake_mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        key = (tensor.device, fake_mode)
        place = self._places.get(key)
        if place is None:
            # Tensors of two fake modes do not mix.
            self._places = {old: known for old, known in self._places.items() if old[1] in (None, fake_mode)}
            is_fake = fake_mode is not None
            arena = None
            if self._ring is None:
                pins_fakes = self._pins_fakes and tensor.device.type not in ("cpu", "meta")
                like = tensor.new_empty(0) if is_fake else None
                arena = HostArena(pin_memory=pins_fakes if is_fake else self._pin_memory, like=like)
            ring = self._ring if not is_fake else None
            place = self._places[key] = Place(arena, ring, make_copies(tensor), tensor)
        return place


_NUM_MEASURED = 2  # steps, of which the quicker one counts: others may use the machine
_NUM_STEPS_UNWATCHED = 100  # after the waits were found to be short enough
_TOLERANCE = 0.01  # of a step, for waits that no limit explains


@dataclass(frozen=True)
class OffloadMeasures:
    """What a step with offloading was measured to take."""

    to_host_bytes_per_second: float  # of a copy while it runs
    to_device_bytes_per_second: float
    forward_seconds: float  # of its first forward, without waits
    backward_seconds: float  # up to the last tensor that was asked for, without waits
    forward_wait_seconds: float  # for memory, which copies to the host held
    backward_wait_seconds: float  # for tensors to be there again
    saved_bytes: int  # what the forward saved and may travel, whether it did or not
    travelling_share: float  # of a byte that is sent away, on the bus: 0.5 where float32 travels in bfloat16
    copies_run_beside: bool  # the computation; it stands still for each copy if not

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
