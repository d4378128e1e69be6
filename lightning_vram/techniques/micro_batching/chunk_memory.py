"""Predict the memory of a chunk of a batch, from chunks that were run."""

from bisect import bisect_right
from math import ceil
from typing import Any

from lightning_vram.argument_checks import check_positive_int


class ChunkMemory:
    """Bytes by chunk size, for batches of one shape: ``fixed + slope * size``, above everything that was seen.

    Where a failed try cannot be undone alone, since every layer waits for all ranks, the size has to be planned: two
    small chunks show a line. Memory that grows faster than the batch is seen only once such a chunk ran; hence the
    margin.

    The line has the slope of least squares and is moved up until it is below no observation. Where the slope is not
    positive, for noise or because so little was needed, the steepest line from zero to an observation is taken.

    Example:
        >>> memory = ChunkMemory()
        >>> memory.observe(1, 110)
        >>> memory.observe(2, 120)
        >>> memory.largest_size(200, limit=64, margin=0.1)
        8
    """

    def __init__(self) -> None:
        self._peak_bytes: dict[int, int] = {}

    def observe(self, size: int, peak_bytes: int) -> None:
        """Note the peak of a chunk above what was allocated when it began; of several of one size, the most counts."""
        check_positive_int("ChunkMemory.observe(size)", size)
        if peak_bytes < 0:
            raise ValueError(f"ChunkMemory.observe(peak_bytes) must not be negative, got {peak_bytes}.")
        self._peak_bytes[size] = max(peak_bytes, self._peak_bytes.get(size, 0))

    def predict_bytes(self, size: int) -> int | None:
        """Predict the bytes of a chunk, at least what chunks up to this size needed; ``None`` before two."""
        if len(self._peak_bytes) < 2:
            return None
        fixed, slope = self._line()
        seen = max((peak for other, peak in self._peak_bytes.items() if other <= size), default=0)
        return max(seen, ceil(fixed + slope * size))

    def largest_size(self, room_bytes: int, limit: int, margin: float = 0.1) -> int | None:
        """Find the largest chunk, 1 to ``limit`` samples, that is predicted to fit; ``None`` before two sizes.

        ``margin`` is the share of ``room_bytes`` to leave free. The smallest chunk may not fit.
        """
        check_positive_int("ChunkMemory.largest_size(limit)", limit)
        if not 0 <= margin < 1:
            raise ValueError(f"ChunkMemory.largest_size(margin) must be at least 0 and below 1, got {margin}.")
        if limit == 1:
            return 1
        if len(self._peak_bytes) < 2:
            return None
        allowed_bytes = int(room_bytes * (1 - margin))
        fitting = bisect_right(range(1, limit + 1), allowed_bytes, key=lambda size: self.predict_bytes(size) or 0)
        return max(1, fitting)

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, for a checkpoint."""
        return {"peak_bytes": dict(self._peak_bytes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; what was seen here is forgotten."""
        restored = ChunkMemory()
        for size, peak_bytes in state["peak_bytes"].items():
            restored.observe(int(size), int(peak_bytes))  # JSON makes keys of ints to strings
        self._peak_bytes = restored._peak_bytes

    def _line(self) -> tuple[float, float]:
        """Return the bytes needed anyway, and those of a sample."""
        mean_size = sum(self._peak_bytes) / len(self._peak_bytes)
        covariance = sum((size - mean_size) * peak for size, peak in self._peak_bytes.items())
        slope = covariance / sum((size - mean_size) ** 2 for size in self._peak_bytes)
        if slope <= 0:
            return 0.0, max(peak / size for size, peak in self._peak_bytes.items())
        return max(peak - slope * size for size, peak in self._peak_bytes.items()), slope
