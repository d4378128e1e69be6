"""Tell all ranks that one of them was told to stop, at the same moment, without making any of them wait.

What a rank knows goes out when a batch begins and is read when the next one does: by then it has long arrived.
"""

import math
from collections.abc import Callable

from lightning_vram.core.processes.agreement import RankAgreement
from lightning_vram.core.processes.stop_signals import StopSignals

_ENDLESS = 2**62


class StopVote:
    """A sequence of votes that all ranks take in step.

    Args:
        agreement: Of all ranks.
        signals: Of this one.
    """

    def __init__(self, agreement: RankAgreement, signals: StopSignals) -> None:
        self._agreement = agreement
        self._signals = signals
        self._pending: Callable[[], tuple[int, ...]] | None = None
        self._strongest = 0
        self._num_left = 0

    @property
    def name(self) -> str:
        """Of the signal that all know of."""
        return self._signals.signals[self._strongest - 1].name

    def exchange(self) -> bool:
        """End the vote before, and begin the next unless it is known. All ranks call it as often.

        Returns:
            Whether the ranks know of a signal, all of them since the same call.

        Raises:
            RankAgreementError: If a rank is gone.
        """
        if self._agreement.is_alone:
            self._strongest = max(self._strongest, self._signals.strongest)
        elif not self._strongest:
            if self._pending is not None:
                (self._strongest,) = self._pending()
            self._pending = None if self._strongest else self._agreement.begin_largest(self._signals.strongest)
        return self._strongest > 0

    def limit(self, num_batches: float) -> None:
        """Agree on how often :meth:`exchange_limited` votes: ranks may evaluate different numbers of batches.

        Args:
            num_batches: Of this rank; infinity if it does not know.

        Raises:
            RankAgreementError: If a rank is gone.
        """
        if self._agreement.is_alone:
            self._num_left = _ENDLESS
            return
        is_endless = math.isinf(num_batches)
        least, most = self._agreement.smallest(_ENDLESS if is_endless else int(num_batches), -int(is_endless))
        self._num_left = least if not most else 0

    def exchange_limited(self) -> bool:
        """Vote as :meth:`exchange`, as long as all ranks come; then ``False``."""
        self._num_left -= 1
        return self._num_left >= 0 and self.exchange()
