"""Stop all ranks at the same moment, without blocking any of them."""

import math
from collections.abc import Callable

from lightning_vram.core.processes.agreement import RankAgreement
from lightning_vram.core.processes.stop_signals import StopSignals

_ENDLESS = 2**62


class StopVote:
    """A sequence of votes on stop signals that all ranks take in step, without blocking.

    A rank sends what it knows when a batch begins and reads the result when the next one does: by then it has arrived.
    """

    def __init__(self, agreement: RankAgreement, signals: StopSignals) -> None:
        self._agreement = agreement
        self._signals = signals
        self._pending: Callable[[], tuple[int, ...]] | None = None
        self._strongest = 0
        self._num_left = 0

    @property
    def name(self) -> str:
        """The name of the signal that all ranks know of."""
        return self._signals.signals[self._strongest - 1].name

    def exchange(self) -> bool:
        """End the last vote, begin the next; return whether the ranks know of a signal, all since the same call.

        All ranks must call it equally often.
        """
        if self._agreement.is_alone:
            self._strongest = max(self._strongest, self._signals.strongest)
        elif not self._strongest:
            if self._pending is not None:
                (self._strongest,) = self._pending()
            self._pending = None if self._strongest else self._agreement.begin_largest(self._signals.strongest)
        return self._strongest > 0

    def limit(self, num_batches: float) -> None:
        """Agree on how often :meth:`exchange_limited` votes; infinity if this rank does not know its number of batches.

        Ranks may evaluate different numbers of batches.
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
