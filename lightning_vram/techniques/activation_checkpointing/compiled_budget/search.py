"""Search for the largest share that stays within a budget."""

from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.torch.partitioner import LEAST_SHARE

CLOSE_ENOUGH = 0.97
"""A share that keeps this much of the budget ends the search."""

MAX_MEASUREMENTS = 7
_AIM = (1 + CLOSE_ENOUGH) / 2
_FIRST_STEP = 0.25
_SMALLEST_STEP = 1 / 256


class CompiledBudgetError(ValueError):
    """Nothing fits."""


class ShareSearch:
    """Searches for the largest share that saves no more than a budget, with as few measurements as possible.

    Saved bytes do not follow the share (https://github.com/pytorch/pytorch/issues/197838): only measured points count.
    The search starts from below, so that steps that try a share seldom exceed the budget.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.kept_bytes: dict[float, int] = {}

    @property
    def best(self) -> float:
        """The largest share that was measured to fit."""
        return max(share for share, kept in self.kept_bytes.items() if kept <= self._budget_bytes)

    @property
    def next_above(self) -> float | None:
        """The least share above it that was measured, and does not fit; ``None`` if none was."""
        return min((share for share in self.kept_bytes if share > self.best), default=None)

    @property
    def is_close(self) -> bool:
        """Whether the best share keeps nearly the budget, or all that there is to keep."""
        best = self.best
        return best == 1 or self.kept_bytes[best] >= CLOSE_ENOUGH * self._budget_bytes

    def note(self, share: float, kept_bytes: int) -> None:
        """Note a measurement; raises ``CompiledBudgetError`` if the least share does not fit."""
        self.kept_bytes[share] = kept_bytes
        if share == LEAST_SHARE and kept_bytes > self._budget_bytes:
            raise CompiledBudgetError(
                f"budget={format_bytes(self._budget_bytes)} is below the minimum of {format_bytes(kept_bytes)}, which "
                "is saved for backward when the compiler recomputes all it can. Increase it, or use smaller batches."
            )

    def next_share(self) -> float | None:
        """Return the next share to try; ``None`` if the search is over."""
        if not self.kept_bytes:
            return LEAST_SHARE
        if self.is_close or len(self.kept_bytes) >= MAX_MEASUREMENTS:
            return None
        best, above = self.best, self.next_above
        if above is None:
            return self._extrapolate(best)
        return self._between(best, above) if above - best > _SMALLEST_STEP else None

    def _between(self, best: float, above: float) -> float:
        """Halve the interval and go along a straight line in it by turns: one is sure, the other is quick."""
        if len(self.kept_bytes) % 2:
            return (best + above) / 2
        kept, too_much = self.kept_bytes[best], self.kept_bytes[above]
        part = (_AIM * self._budget_bytes - kept) / (too_much - kept)
        return best + min(max(part, 0.1), 0.9) * (above - best)

    def _extrapolate(self, best: float) -> float:
        """Go on upwards along the last two points, if the curve rises, else by doubling."""
        below = [share for share in self.kept_bytes if share < best]
        if not below:
            return _FIRST_STEP
        rise = self.kept_bytes[best] - self.kept_bytes[max(below)]
        if rise <= 0:
            return min(1.0, 2 * best)
        rest = _AIM * self._budget_bytes - self.kept_bytes[best]
        step = rest * (best - max(below)) / rise
        return min(1.0, best + max(step, _SMALLEST_STEP))
