"""One number of samples per micro-batch, for all ranks."""

from dataclasses import dataclass
from datetime import timedelta

from lightning_vram.core.batches.cutting import BatchFacts
from lightning_vram.core.processes.agreement import RankAgreement
from lightning_vram.techniques.micro_batching.remembered_sizes import MicroBatchSizes

_WHOLE = 2**62  # samples; larger than any batch


class FixedSize:
    """The size the user chose."""

    retries = False

    def __init__(self, size: int) -> None:
        self._size = size

    def propose(self, shape: str, num_samples: int, num_elements: int) -> int | None:
        """The same for all."""
        return self._size

    def note_failure(self, shape: str, size: int, num_elements: int | None) -> None:
        """Never called: an error is an error."""

    def note_success(self, shape: str, size: int | None, num_elements: int) -> None:
        """Nothing to learn."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks do with their batches."""

    size: int  # samples per micro-batch
    count: int | None  # how many micro-batches every rank runs; ``None`` where ranks may differ


class AgreedSizes:
    """Ranks propose, the smallest size holds; one runs out of memory, all of them halve."""

    def __init__(
        self, chooser: FixedSize | MicroBatchSizes, agreement: RankAgreement | None, *, has_equal_counts: bool
    ) -> None:
        self._chooser = chooser
        self._agreement = agreement  # between the ranks; ``None`` where each decides for itself
        self.has_equal_counts = has_equal_counts  # whether all ranks must run the same number of micro-batches
        self._largest_batch = 0

    @property
    def retries(self) -> bool:
        """Whether a batch that ran out of memory runs again."""
        return self._chooser.retries

    def start(self, facts: BatchFacts, limit: int | None = None) -> Agreed:
        """Choose for a batch, at most ``limit`` samples. A collective, unless sizes are fixed and counts free."""
        proposed = self._chooser.propose(facts.shape, facts.num_samples, facts.num_elements)
        size = min(_WHOLE if proposed is None else proposed, _WHOLE if limit is None else limit)
        self._largest_batch = facts.num_samples
        if self._agreement is not None and not self._agreement.is_alone and (self.retries or self.has_equal_counts):
            negative, self._largest_batch = self._agreement.largest(-size, facts.num_samples)
            size = -negative
        return self._agreed(min(size, self._largest_batch))

    def has_failed(self, *, here: bool, timeout: timedelta | None = None) -> bool:
        """Whether a try ran out of memory on any rank. A collective."""
        if self._agreement is None:
            return here
        return bool(self._agreement.largest(int(here), timeout=timeout)[0])

    def halve(self, facts: BatchFacts, agreed: Agreed, *, here: bool) -> Agreed:
        """Choose again, after a try that ran out of memory."""
        self._chooser.note_failure(facts.shape, agreed.size, facts.elements_of(agreed.size) if here else None)
        return self._agreed((agreed.size + 1) // 2)

    def settle(self, facts: BatchFacts, agreed: Agreed) -> None:
        """A batch ran through."""
        size = agreed.size if agreed.size < facts.num_samples else None
        self._chooser.note_success(facts.shape, size, facts.elements_of(agreed.size))

    def _agreed(self, size: int) -> Agreed:
        return Agreed(size, -(-self._largest_batch // size) if self.has_equal_counts else None)
