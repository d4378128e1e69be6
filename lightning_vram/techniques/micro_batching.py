"""How many samples run at once: measured or given, agreed among ranks, remembered. May import: core, memory."""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.batches.micro_batches import NormMomentum
from lightning_vram.core.batches.splitting import BatchFacts
from lightning_vram.core.ranks import RankAgreement
from lightning_vram.memory.device.accelerators import FreeMemory
from lightning_vram.private_names.torch import NormBase

_MAX_SHAPES = 1024  # text of all lengths makes a new one every few batches


@dataclass
class _Fit:
    """What is known about one shape."""

    size: int | None  # samples per micro-batch; ``None`` for the whole batch
    num_good: int = 0  # batches in a row that fit


class MicroBatchSizes:
    """Sizes that fit, by shape of batch.

    A shape not met yet starts with the whole batch, unless a micro-batch with as many elements has already failed:
    then with the first half, quarter and so on that has fewer. After ``regrow_after_n_batches`` batches of a shape in a
    row (``None``: never) the double size is tried again, and after twice as many the next time it fails.
    """

    retries = True

    def __init__(self, regrow_after_n_batches: int | None) -> None:
        self._regrow_after = regrow_after_n_batches
        self._patience = regrow_after_n_batches
        self._fits: dict[str, _Fit] = {}
        self._failing_elements: int | None = None  # the smallest micro-batch that failed
        self._tried: tuple[str, int | None] | None = None  # the larger size under way

    def propose(self, shape: str, num_samples: int, num_elements: int) -> int | None:
        """How many samples to run at once; ``None`` for all of them."""
        fit = self._fits.get(shape)
        self._tried = None
        if fit is None:
            fit = self._fits[shape] = _Fit(self._first_guess(num_samples, num_elements))
            if len(self._fits) > _MAX_SHAPES:
                del self._fits[next(iter(self._fits))]
        elif fit.size is not None and self._patience is not None and fit.num_good >= self._patience:
            self._tried = shape, 2 * fit.size if 2 * fit.size < num_samples else None
            return self._tried[1]
        return fit.size

    def note_failure(self, shape: str, size: int, num_elements: int | None) -> None:
        """A micro-batch ran out of memory, here or on another rank: the next one has half as many samples."""
        if self._tried is not None and self._patience is not None:
            self._patience *= 2  # what fails again and again costs more than it could gain
        self._tried = None
        self._fits[shape] = _Fit(max(1, (size + 1) // 2))
        if num_elements is not None:
            self._failing_elements = min(num_elements, self._failing_elements or num_elements)

    def note_success(self, shape: str, size: int | None, num_elements: int) -> None:
        """A batch ran through, in micro-batches of ``size``; ``None`` if it ran whole."""
        fit = self._fits.setdefault(shape, _Fit(size))
        fit.num_good += 1
        if self._tried == (shape, size):
            self._fits[shape] = _Fit(size, num_good=1)
            self._patience = self._regrow_after
        if self._failing_elements is not None and num_elements >= self._failing_elements:
            self._failing_elements = num_elements + 1

    def state_dict(self) -> dict[str, Any]:
        """What was learned."""
        fits = {shape: asdict(fit) for shape, fit in self._fits.items()}
        return {"fits": fits, "failing_elements": self._failing_elements, "patience": self._patience}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was learned in another run."""
        self._fits = {shape: _Fit(**fit) for shape, fit in state["fits"].items()}
        self._failing_elements = state["failing_elements"]
        if self._regrow_after is not None:
            self._patience = state["patience"] or self._regrow_after

    def _first_guess(self, num_samples: int, num_elements: int) -> int | None:
        if self._failing_elements is None or num_elements < self._failing_elements:
            return None
        size = num_samples
        while size > 1 and size * num_elements >= self._failing_elements * num_samples:
            size = (size + 1) // 2
        return size


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


class ChunkMemory:
    """Bytes by chunk size, for batches of one shape: ``fixed + slope * size``, above everything that was seen.

    The line has the slope of least squares and is moved up until it is below no observation; where the slope is not
    positive, it is the steepest from zero to an observation. Memory that grows faster than the batch is seen only once
    such a chunk ran; hence the margin.

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


PROBED_SIZES = (2, 2, 3)  # samples, as norms want two; the first makes gradients and workspaces for the others


class SizePlanning:
    """Measures small micro-batches, and says how large they may be.

    Sizes are counted in elements of the batch, so that what one shape showed holds for others.
    """

    def __init__(self, room: FreeMemory) -> None:
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


class NormCounting:
    """One batch in parts: each moves the running statistics by its share, and all of them count as one batch.

    With momentum m the statistics s become (1 - m) s + m x. A part with share w does so with 1 - (1 - m)^w: together
    they forget as much of s as the whole batch would. The normalisation itself still sees one part at a time.
    """

    def __init__(self, module: nn.Module) -> None:
        self._momentum = NormMomentum(module)
        self._counts: list[tuple[Tensor, Tensor]] = [
            (norm.num_batches_tracked, norm.num_batches_tracked.clone())
            for norm in module.modules()
            # A cumulative average (momentum=None) takes its factor from this count, and every part counts.
            if isinstance(norm, NormBase) and norm.num_batches_tracked is not None and norm.momentum is not None
        ]

    def begin_part(self, share: float) -> None:
        """The next part has this share of the samples."""
        self._momentum.scale(share)

    def finish(self) -> None:
        """All parts ran."""
        self.restore()
        with torch.no_grad():
            for count, before in self._counts:
                count.copy_(torch.where(count > before, before + 1, before))

    def restore(self) -> None:
        """Put the momentum back."""
        self._momentum.restore()
