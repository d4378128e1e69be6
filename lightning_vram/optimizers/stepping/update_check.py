"""Count updates of weights, or of moments, that rounding takes back: what FlashOptim calls ``check_numerics``."""

from collections.abc import Callable

from torch import Tensor


class UpdateCheck:
    """Of the steps since it began. Takes 8 bytes for each number of a part that is stepped at once.

    Args:
        is_due: Whether to count in the step that begins.
    """

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self._is_due = is_due
        self._counts: list[tuple[Tensor, Tensor]] | None = None

    def begin(self) -> None:
        """Forget the steps before."""
        self._counts = [] if self._is_due() else None

    @property
    def is_counting(self) -> bool:
        """Whether it is due."""
        return self._counts is not None

    def note(self, numbers: Tensor) -> Tensor | None:
        """Return a copy of numbers that are about to change, if they are to be counted."""
        return numbers.clone() if self.is_counting else None

    def count(self, before: Tensor, stepped: Tensor, kept: Tensor) -> None:
        """Count those that the step has moved, and those of them that are kept as they were. Writes to ``stepped``."""
        assert self._counts is not None
        is_moved = stepped.ne_(before)
        is_lost = kept.eq(before).logical_and_(is_moved)
        self._counts.append((is_lost.sum(), is_moved.count_nonzero()))

    @property
    def share(self) -> Tensor | None:
        """Those that were lost of those that there were, a scalar, 0 to 1; ``None``: nothing was counted."""
        if not self._counts:
            return None
        lost, moved = (sum(numbers[1:], numbers[0]) for numbers in zip(*self._counts, strict=True))
        share: Tensor = lost / moved.clamp(min=1)
        return share
