"""Tell steady growth from noise: batches of different lengths, caches that fill up, the host's allocator."""

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from math import sqrt

_STRIDE = 16  # of the coarse series: growth by leaps, or below the noise of single steps
_NUM_DEVIATIONS = 4.0  # that chance gets to once in 30,000


class Growth:
    """``length`` counts at equal moments, and the least of each 16; growth starts at ``min_bytes`` per count."""

    def __init__(self, length: int, min_bytes: int) -> None:
        self._length = length
        self._min_bytes = min_bytes
        self._fine: deque[int] = deque(maxlen=length)
        self._coarse: deque[int] = deque(maxlen=length)
        self._block: list[int] = []

    def add(self, count: int) -> None:
        """Note the next count."""
        self._fine.append(count)
        self._block.append(count)
        if len(self._block) == _STRIDE:
            self._coarse.append(min(self._block))
            self._block.clear()

    def restart(self) -> None:
        """Forget all counts."""
        for counts in (self._fine, self._coarse, self._block):
            counts.clear()

    @property
    def is_full(self) -> bool:
        """Whether there are as many counts as decide."""
        return len(self._fine) == self._length

    def steady_bytes(self) -> int | None:
        """Return by how much each count is larger than the last, if they grow steadily; ``None`` if not."""
        for counts, stride in ((self._fine, 1), (self._coarse, _STRIDE)):
            slope = self._steady_slope(list(counts)) if len(counts) == self._length else None
            if slope is not None and slope >= self._min_bytes * stride:
                return int(slope / stride)
        return None

    def goes_on(self) -> bool:
        """Whether the later half is above the earlier by half of the least growth. Ask it if :attr:`is_full`."""
        half = self._length // 2
        counts = list(self._fine)
        return min(counts[-half:]) - min(counts[:half]) >= self._min_bytes * half // 2

    def _steady_slope(self, counts: Sequence[int]) -> float | None:
        """Return the slope of Theil and Sen, if the trend of Mann and Kendall is beyond chance."""
        half = len(counts) // 2
        if min(counts[half:]) <= min(counts[:half]):
            return None  # the usual case, at once
        number = len(counts)
        pairs = list(combinations(range(number), 2))
        trend = sum((counts[late] > counts[early]) - (counts[late] < counts[early]) for early, late in pairs)
        deviation = sqrt(number * (number - 1) * (2 * number + 5) / 18)
        if trend < min(_NUM_DEVIATIONS * deviation, len(pairs)):
            return None
        return statistics.median((counts[late] - counts[early]) / (late - early) for early, late in pairs)
