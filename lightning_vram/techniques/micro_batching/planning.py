"""Plan how many samples run at once, where a try that runs out of memory could not be repaired on one rank alone."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_vram.core.batches.cutting import BatchFacts
from lightning_vram.memory.device.room import DeviceRoom
from lightning_vram.techniques.micro_batching.chunk_memory import ChunkMemory

PROBED_SIZES = (2, 2, 3)  # samples, as norms want two; the first makes gradients and workspaces for the others


class SizePlanning:
    """Measures small micro-batches, and says how large they may be.

    Sizes are counted in elements of the batch, so that what one shape showed holds for others.
    """

    def __init__(self, room: DeviceRoom) -> None:
        self._room = room
        self._memory = ChunkMemory()
        self.is_probed = False
        self._is_too_large = False
        self._has_failed = False

    @contextmanager
    def watching(self, num_elements: int) -> Iterator[None]:
        """Run a micro-batch of so many elements inside."""
        self._room.reset()
        before = self._room.allocated_bytes()
        yield
        self._memory.observe(max(1, num_elements), max(0, self._room.peak_since_reset() - before))

    def give_up(self, *, is_too_large: bool) -> None:
        """A small micro-batch failed: for lack of memory here (only size 1 is left to try), or for another reason."""
        self._has_failed, self._is_too_large = True, is_too_large

    def limit(self, facts: BatchFacts) -> int | None:
        """Return how many samples of a batch are predicted to fit; ``None`` while nothing is known."""
        if self._has_failed:
            return 1 if self._is_too_large else None
        most = max(1, facts.num_elements)
        elements = self._memory.largest_size(self._room.room_bytes(), most)
        if elements is None or elements >= most:
            return None
        return max(1, elements * facts.num_samples // most)
