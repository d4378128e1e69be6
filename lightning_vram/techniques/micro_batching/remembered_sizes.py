"""Remember how many samples fit at once, per shape of batch, and when to try more again."""

from dataclasses import asdict, dataclass
from typing import Any

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
