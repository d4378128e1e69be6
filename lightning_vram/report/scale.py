"""What drawings share: the axis of bytes, files of pictures and pages, points with numbers."""

from dataclasses import dataclass

from lightning_vram.memory.units import GIB, KIB, MIB, TIB

_FAR = 2.5  # times what is needed: a limit beyond it would press the step to the ground
_NUM_TICKS = 7  # at most
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Scale:
    """From 0 to ``end_bytes``, in steps of ``tick_bytes``."""

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


def choose_scale(needed_bytes: int, limit_bytes: int, headroom: float = 1.14) -> Scale:
    """Find the axis on which a step is large and its limit is seen, if both can be, with headroom for words above."""
    has_limit = limit_bytes <= _FAR * needed_bytes
    end_bytes = headroom * (max(needed_bytes, limit_bytes) if has_limit else needed_bytes)
    unit_bytes, unit = unit_of(end_bytes)
    return Scale(unit, unit_bytes, end_bytes, round_step(end_bytes / unit_bytes / _NUM_TICKS) * unit_bytes, has_limit)


def unit_of(num_bytes: float) -> tuple[int, str]:
    """Return the largest unit of bytes of which there is one, and its name."""
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
    return next(found for found in units if num_bytes >= found[0] or found[0] == 1)


def round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... (and their tenths)."""
    power = 1.0
    while power > step:
        power /= 10
    while power * 10 <= step:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)
