"""What ``track_memory`` measured: every change of live bytes, and sums over them."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate

HOST = "cpu"


class Category(StrEnum):
    """What a storage is for."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"  # made in a forward (or its recomputation) and alive when the backward takes over
    TEMPORARIES = "temporaries"  # everything else: came and went within a phase


class Phase(StrEnum):
    """Which part of a training step is running."""

    FORWARD = "forward"  # and whatever is neither of the others: data, metrics, logging
    BACKWARD = "backward"  # recomputation included
    OPTIMIZER_STEP = "optimizer_step"


@dataclass(frozen=True)
class Allocation:
    """One storage, from birth to death."""

    op: str  # operator that made it; ``"held"``: it was there before; ``"NAME (scratch)"``: in addition to results
    module: str  # name of the innermost module it belongs to or was made in; empty for the root and outside of any
    phase: Phase  # phase in which it was made
    category: Category  # what it is for, known at the end
    device: str  # where it lies, as ``"cuda:0"``
    is_pinned: bool = False  # whether it was reported as page-locked host memory
    stream: int = 0  # on which it was made: 0 is the default one, others count in order of sight


@dataclass(frozen=True)
class MemoryEvent:
    """One change of the live bytes."""

    allocation: int  # index into :attr:`MemoryTimeline.allocations`
    change_bytes: int  # positive at birth and growth, negative at death and shrinking
    phase: Phase  # phase in which it happened


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes over a piece of a program: frozen, comparable with ``==``, the same at each run of the same program.

    All sums are over one device, :attr:`device`; :meth:`on` gives the same view of another.

    Args:
        allocations: Every storage seen, in order of birth.
        events: Every change of live bytes, in order.
        backward_starts: Indices into ``events`` at which a backward began.
        device: Device that the sums are over.
    """

    allocations: tuple[Allocation, ...]
    events: tuple[MemoryEvent, ...]
    backward_starts: tuple[int, ...]
    device: str

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices on which anything was seen, sorted."""
        return tuple(sorted({allocation.device for allocation in self.allocations}))

    def on(self, device: str) -> "MemoryTimeline":
        """The same timeline with its sums over ``device``, named as in :attr:`devices`."""
        return replace(self, device=device)

    def between(self, start: int, stop: int) -> "MemoryTimeline":
        """A part of the timeline: what is alive at its start is there as if born then, in order of birth.

        Args:
            start: Index into :attr:`events` of the first event.
            stop: Index after the last.
        """
        held: Counter[int] = Counter()
        for event in self.events[:start]:
            held[event.allocation] += event.change_bytes
        first = self.events[start].phase if start < len(self.events) else Phase.FORWARD
        births = [MemoryEvent(number, num_bytes, first) for number, num_bytes in sorted(held.items()) if num_bytes]
        shift = len(births) - start
        return replace(
            self,
            events=(*births, *self.events[start:stop]),
            backward_starts=tuple(begin + shift for begin in self.backward_starts if start <= begin <= stop),
        )

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self._live, default=0)

    @property
    def peak_op(self) -> str:
        """Operator whose result made the peak; empty if nothing was ever alive."""
        return self.allocations[self.events[self._peak_event].allocation].op if self._peak_event >= 0 else ""

    @property
    def peak_phase(self) -> Phase | None:
        """Phase in which the peak was reached; ``None`` if nothing was ever alive."""
        return self.events[self._peak_event].phase if self._peak_event >= 0 else None

    @cached_property
    def peak_by_category(self) -> Mapping[Category, int]:
        """Bytes of each category at the peak; they add up to :attr:`peak_bytes`."""
        found = dict.fromkeys(Category, 0)
        for number, num_bytes in self.peak_allocations.items():
            found[self.allocations[number].category] += num_bytes
        return found

    @cached_property
    def peak_by_module(self) -> Mapping[str, int]:
        """Bytes of each module at the peak, largest first; they add up to :attr:`peak_bytes`.

        Made in its forward, or its parameters, buffers, gradients and optimizer state. The empty name holds what the
        root or no module made, temporaries of the backward among it.
        """
        found: Counter[str] = Counter()
        for number, num_bytes in self.peak_allocations.items():
            found[self.allocations[number].module] += num_bytes
        return dict(found.most_common())

    @cached_property
    def peak_allocations(self) -> Mapping[int, int]:
        """Bytes at the peak, by index into :attr:`allocations`."""
        live: Counter[int] = Counter()
        for event in self.events[: self._peak_event + 1]:
            if self.allocations[event.allocation].device == self.device:
                live[event.allocation] += event.change_bytes
        return {number: num_bytes for number, num_bytes in live.items() if num_bytes}

    @cached_property
    def peak_by_phase(self) -> Mapping[Phase, int]:
        """Most bytes alive at once during each phase; phases in which nothing changed are left out."""
        found: dict[Phase, int] = {}
        for event, before, after in zip(self.events, [0, *self._live], self._live, strict=False):
            if self.allocations[event.allocation].device == self.device:
                found[event.phase] = max(found.get(event.phase, 0), before, after)
        return {phase: found[phase] for phase in Phase if phase in found}

    def peak_of(self, category: Category) -> int:
        """Most bytes of one category alive at once, which may be at another moment than the peak of all."""
        return max(self._sums(lambda one: one.device == self.device and one.category is category), default=0)

    @cached_property
    def saved_for_backward_bytes(self) -> int:
        """Bytes made in the forward and still alive when a backward began: the most over all backwards.

        Counted is what is alive, whether autograd keeps it or a Python variable does. No saved-tensor hook is
        installed for this, since hooks switch autograd's check for overwritten tensors off.
        """
        sums = self._sums(lambda one: one.device == self.device and one.category is Category.ACTIVATIONS)
        return max((sums[start - 1] for start in self.backward_starts if start), default=0)

    @property
    def live_bytes(self) -> int:
        """Bytes alive at the end."""
        return self._live[-1] if self._live else 0

    @property
    def host_peak_bytes(self) -> int:
        """Most bytes alive at once on the host; 0 if the host is the device itself."""
        return 0 if self.device == HOST else self.on(HOST).peak_bytes

    @property
    def pinned_peak_bytes(self) -> int:
        """Most bytes of page-locked host memory at once, as far as it was reported."""
        return max(self._sums(lambda one: one.is_pinned), default=0)

    def _sums(self, counts: Callable[[Allocation], bool]) -> list[int]:
        """Return the live bytes of some allocations after each event."""
        counted = [counts(one) for one in self.allocations]
        return list(accumulate(event.change_bytes if counted[event.allocation] else 0 for event in self.events))

    @cached_property
    def _live(self) -> list[int]:
        return self._sums(lambda one: one.device == self.device)

    @cached_property
    def _peak_event(self) -> int:
        return self._live.index(self.peak_bytes) if self.peak_bytes else -1
