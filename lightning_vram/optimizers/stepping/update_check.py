"""Count lost updates (FlashOptim: ``check_numerics``)."""

from collections.abc import Callable

from torch import Tensor


class UpdateCheck:
    """Counts updates of weights or moments that rounding undoes; takes 8 bytes per number that is stepped at once."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self._is_due = is_due
        self._counts: list[tuple[Tensor, Tensor]] | None = None

    def begin(self) -> None:
        """Begin a step, and forget earlier ones."""
        self._counts = [] if self._is_due() else None

    @property
    def is_counting(self) -> bool:
        """Whether this step is counted."""
        return self._counts is not None

    def note(self, numbers: Tensor) -> Tensor | None:
        """Copy numbers that are about to change, if this step is counted."""
        return numbers.clone() if self.is_counting else None

    def count(self, before: Tensor, stepped: Tensor, kept: Tensor) -> None:
        """Count numbers that the step moved, and those among them stored unchanged. Overwrites ``stepped``."""
        assert self._counts is not None
        is_moved = stepped.ne_(before)
        is_lost = kept.eq(before).logical_and_(is_moved)
        self._counts.append((is_lost.sum(), is_moved.count_nonzero()))

    @property
    def share(self) -> Tensor | None:
        """Share of lost updates, a scalar from 0 to 1; ``None``: not counted."""
        if not self._counts:
            return None
        lost, moved = (sum(numbers[1:], numbers[0]) for numbers in zip(*self._counts, strict=True))
        share: Tensor = lost / moved.clamp(min=1)
        return share
