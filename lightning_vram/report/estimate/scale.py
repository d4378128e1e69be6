"""The axis of bytes: its unit, its end, and what stands beyond it."""

from dataclasses import dataclass

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import GIB, KIB, MIB, TIB

_HEADROOM = 1.14  # above the highest line, for words
_FAR = 2.5  # times what is needed: a limit beyond it would press the step to the ground
_NUM_TICKS = 7  # at most
_ROOM = 0.25  # of the axis, for three lines of words


@dataclass(frozen=True)
class Scale:
    """From 0 to ``end_bytes``, in steps of ``tick_bytes``.

    Args:
        unit: ``"GiB"``, ``"MiB"``, ...
        unit_bytes: Its size.
        end_bytes: Where the axis ends.
        tick_bytes: Between its marks.
        has_limit: Whether the device's memory lies on it.
    """

    unit: str
    unit_bytes: int
    end_bytes: float
    tick_bytes: float
    has_limit: bool

    @property
    def ticks(self) -> tuple[float, ...]:
        """Marks in bytes, from 0."""
        return tuple(number * self.tick_bytes for number in range(int(self.end_bytes / self.tick_bytes) + 1))

    def label(self, num_bytes: float) -> str:
        """A mark's number in the unit."""
        return f"{num_bytes / self.unit_bytes:g}"


def choose_scale(estimate: MemoryEstimate) -> Scale:
    """Find the axis on which the step is large and the limit is seen, if both can be."""
    needed, limit = (
        max(estimate.needed_bytes, estimate.peak_bytes + estimate.context_bytes),
        estimate.device.memory_bytes,
    )
    has_limit = limit <= _FAR * needed
    end_bytes = _HEADROOM * (max(needed, limit) if has_limit else needed)
    unit_bytes, unit = unit_of(end_bytes)
    return Scale(unit, unit_bytes, end_bytes, _round_step(end_bytes / unit_bytes / _NUM_TICKS) * unit_bytes, has_limit)


def unit_of(num_bytes: float) -> tuple[int, str]:
    """Return the largest unit of bytes of which there is one, and its name."""
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
    return next(found for found in units if num_bytes >= found[0] or found[0] == 1)


def is_note_above(estimate: MemoryEstimate, scale: Scale) -> bool:
    """Whether the words at the peak stand above it: where nothing else is, or there is no room below."""
    above = estimate.device.memory_bytes if estimate.fits and scale.has_limit else scale.end_bytes
    room = _ROOM * scale.end_bytes
    return above - estimate.needed_bytes >= room or estimate.context_bytes + estimate.peak_bytes < room


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... (and their tenths)."""
    power = 1.0
    while power > step:
        power /= 10
    while power * 10 <= step:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)
