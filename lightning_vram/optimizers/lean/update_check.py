"""Count updates of weights that rounding takes back: what FlashOptim calls ``check_numerics``."""

from collections.abc import Callable

from torch import Tensor

from lightning_vram.optimizers.lean.weight_chunks import WeightChunk


class UpdateCheck:
    """Of the step that was made last. Takes 8 bytes for each weight of a chunk while that is stepped.

    Args:
        is_due: Whether to count in the step that begins.
    """

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self._is_due = is_due
        self._counts: list[tuple[Tensor, Tensor]] | None = None

    def begin(self) -> None:
        """Forget the step before."""
        self._counts = [] if self._is_due() else None

    def note(self, weights: Tensor) -> Tensor | None:
        """Return a copy of weights that are about to change, if they are to be counted."""
        return None if self._counts is None else weights.clone()

    def count(self, before: Tensor | None, stepped: Tensor | None, chunk: WeightChunk) -> None:
        """Count those that the step has moved, and those of them that are kept as they were."""
        if self._counts is None or before is None or stepped is None:
            return
        is_moved = stepped.ne_(before)
        is_lost = chunk.read().eq(before).logical_and_(is_moved)
        self._counts.append((is_lost.sum(), is_moved.count_nonzero()))

    @property
    def share(self) -> Tensor | None:
        """Those that were lost of those that there were, a scalar, 0 to 1; ``None``: nothing was counted."""
        if not self._counts:
            return None
        lost, moved = (sum(numbers[1:], numbers[0]) for numbers in zip(*self._counts, strict=True))
        share: Tensor = lost / moved.clamp(min=1)
        return share
