"""Hold the peak memory of tests against a file of earlier peaks: what the fixture ``peak_memory`` of pytest does.

pytest itself loads ``pytest_lightning_vram``, which imports this module when a test asks for the fixture: importing
this package takes seconds, and most tests need nothing of it. Lightning is not needed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_vram.memory.tracking.tracker import MemoryTracker, track_memory
from lightning_vram.memory.units import format_bytes


class PeakMemoryError(AssertionError):
    """A test needs more memory than before."""


@dataclass
class PeakMemory:
    """The fixture ``peak_memory`` of one test: tracks a block as :func:`lightning_vram.track_memory` does."""

    test: str
    known: dict[str, int] | None  # None: nothing to compare with
    tolerance: float
    file: str
    measured: dict[str, int]
    num_blocks: int = 0

    @contextmanager
    def __call__(
        self, module: nn.Module | None = None, *, optimizers: Iterable[Optimizer] = (), inputs: Any = None
    ) -> Iterator[MemoryTracker]:
        """Track the block, then compare its peak.

        Args:
            module: Counts its parameters, buffers and gradients.
            optimizers: Counts their state.
            inputs: Any nest of tensors, such as a batch.

        Yields:
            The tracker: ``tracker.timeline`` has ``peak_bytes``, ``peak_by_phase`` and more.

        Raises:
            PeakMemoryError: If the peak has grown by more than the tolerance, or the file does not know the test.
        """
        with track_memory(module, optimizers=optimizers, inputs=inputs) as tracker:
            yield tracker
        self.num_blocks += 1
        name = self.test if self.num_blocks == 1 else f"{self.test}#{self.num_blocks}"
        self.measured[name] = tracker.timeline.peak_bytes
        if self.known is not None:
            self._compare(name, self.known.get(name), tracker.timeline.peak_bytes)

    def _compare(self, name: str, old: int | None, new: int) -> None:
        way_out = f"pytest --vram-baseline {self.file} --vram-update"
        if old is None:
            raise PeakMemoryError(
                f"{name} has no baseline in {self.file}; its peak is {new:,} bytes now. To record it: {way_out}"
            )
        if new > old * (1 + self.tolerance / 100):
            growth = f"by {100 * (new - old) / old:.2f} %" if old else "from nothing"
            raise PeakMemoryError(
                f"{name}: peak memory has grown {growth}, from {old:,} to {new:,} bytes ({format_bytes(old)} to "
                f"{format_bytes(new)}); allowed: {self.tolerance:g} %. If this is intended: {way_out}"
            )
