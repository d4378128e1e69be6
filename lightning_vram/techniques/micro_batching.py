"""Which samples run at once: how a batch is cut, sizes given or found, agreed among ranks. May import: core, memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_vram.core.batches import splitting
from lightning_vram.core.batches.micro_batches import NormMomentum
from lightning_vram.core.ranks import RankAgreement
from lightning_vram.private_names.torch import NormBase

_WAY = f"To split it, {splitting.WAY_OUT}."
_SEQUENCE_DIMS = (2, 3)  # [T, B] of tokens, [T, B, D]
SplitFunction = Callable[[Any, int], Sequence[Any]]


@dataclass(frozen=True)
class BatchFacts:
    """The size of a batch, by which micro-batch sizes are chosen."""

    num_samples: int
    num_elements: int  # of everything that has one entry per sample
    shape: str  # equal for batches that cost the same
    why_whole: str | None = None  # why it cannot be cut, so that it counts as one sample

    def elements_of(self, size: int) -> int:
        """Elements of a micro-batch of ``size`` samples."""
        return math.ceil(self.num_elements * min(size, self.num_samples) / max(1, self.num_samples))


class BatchCutter:
    """Cuts batches into views of their tensors.

    ``split(batch, size)`` returns micro-batches of ``size`` samples, the last one with the remainder. Tensors with too
    few dimensions for ``batch_dim`` are cut along their first. ``time_first`` names a layer that takes time before
    samples: batches that do not show where their samples are cannot be cut then.
    """

    def __init__(
        self,
        shared_keys: Sequence[str] = (),
        split: SplitFunction | None = None,
        *,
        batch_dim: int = 0,
        time_first: str | None = None,
        has_all_keys: bool = True,
    ) -> None:
        self._splitter = splitting.BatchSplitter(shared_keys, has_all_keys=has_all_keys)
        self._shared = splitting.SharedKeys(shared_keys)
        self._split = split
        self.batch_dim = batch_dim
        self._time_first = time_first if split is None else None

    def measure(self, batch: Any) -> BatchFacts:
        """Measure a batch; ``BatchSplitError`` if it cannot be split."""
        moved = _move_dim(batch, self.batch_dim, 0)
        num_samples = self._count(moved) if self._split is None else len(self._split(batch, 1))
        if num_samples < 1:
            raise splitting.SplitArgumentError(
                f"split_batch(batch, 1) returned no micro-batch for a {type(batch).__name__}."
            )
        if self._time_first is not None and not self._shows_samples(batch, num_samples):
            raise splitting.BatchSplitError(
                f"The module's layer {self._time_first!r} has batch_first=False, so dimension 0 of the batch may be "
                f"time ({splitting.describe_all(batch)}). Pass batch_dim=1 to MicroBatching if it is, batch_dim=0 if "
                "it is not, or split=."
            )
        if self.batch_dim and self._split is None:
            self._refuse_samples_first(batch, num_samples)
        num_elements = max(num_samples, self._splitter.elements(moved))
        return BatchFacts(num_samples, num_elements, f"{num_samples} of {self._splitter.shape_key(batch)}")

    def _count(self, moved: Any) -> int:
        try:
            return self._splitter.batch_size(moved)
        except splitting.BatchSplitError as error:
            if not self.batch_dim:
                raise
            raise type(error)(f"{error} Shapes are shown with dimension {self.batch_dim} (batch_dim=) first.") from None

    def _shows_samples(self, batch: Any, num_samples: int) -> bool:
        """Whether something has an entry for each sample that has no time: labels, images, a list of texts."""
        for _, value in splitting.iterate(batch, splitting.BatchPath(), self._shared):
            parts = splitting.take_apart(value)
            values = parts.values if parts is not None and parts.is_list else ()
            if len(values) == num_samples and splitting.is_plain(values):
                return True
            if splitting.count_rows(value) == num_samples and getattr(value, "ndim", 0) not in _SEQUENCE_DIMS:
                return True
        return False

    def _refuse_samples_first(self, batch: Any, num_samples: int) -> None:
        """Refuse what has its samples in dimension 0, and something else in ``batch_dim``: targets ``[B, 1]``."""
        for path, value in splitting.iterate(batch, splitting.BatchPath(), self._shared):
            sizes: Sequence[int] = getattr(value, "shape", ())
            is_known = splitting.count_rows(value) is not None and len(sizes) > self.batch_dim
            if is_known and sizes[self.batch_dim] != num_samples == sizes[0]:
                raise splitting.BatchSplitError(
                    f"{path.code} has {num_samples} samples in dimension 0 and not in batch_dim={self.batch_dim} "
                    f"({splitting.describe_all(value)}). {_WAY}"
                )

    def measure_or_keep_whole(self, batch: Any) -> BatchFacts:
        """As :meth:`measure`, but a batch that cannot be cut is one sample, unless the arguments are wrong."""
        try:
            return self.measure(batch)
        except splitting.SplitArgumentError:
            raise
        except splitting.BatchSplitError as error:
            num_elements = max(1, self._splitter.elements(batch))
            return BatchFacts(1, num_elements, f"whole {self._splitter.shape_key(batch)}", why_whole=str(error))

    def cut(self, batch: Any, facts: BatchFacts, size: int) -> list[tuple[Any, int]]:
        """Cut into the fewest micro-batches of at most ``size`` samples, as equal as possible; with their sizes."""
        if facts.why_whole is not None:
            return [(splitting.refresh(batch), 1)]
        num_samples = facts.num_samples
        count = -(-num_samples // size)
        if self._split is None:
            # A last one of a single sample would be one that batch norms refuse.
            sizes = [num_samples // count + (number < num_samples % count) for number in range(count)]
            parts = self._splitter.split(_move_dim(batch, self.batch_dim, 0), sizes)
            return list(zip([_move_dim(part, 0, self.batch_dim) for part in parts], sizes, strict=True))
        sizes = [min(size, num_samples - start) for start in range(0, num_samples, size)]
        parts = list(self._split(batch, size))
        if len(parts) != len(sizes):
            raise splitting.BatchSplitError(
                f"split_batch(batch, {size}) returned {len(parts)} micro-batches for {num_samples} samples, "
                f"expected {len(sizes)}: {size} samples each, the last one with the remainder."
            )
        return list(zip(parts, sizes, strict=True))


def find_time_first(module: nn.Module) -> str | None:
    """Return the name of the first recurrent layer or attention in ``module`` that has ``batch_first=False``."""
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    found = (name for name, layer in module.named_modules() if isinstance(layer, kinds) and not layer.batch_first)
    return next(found, None)


def _move_dim(value: Any, source: int, destination: int) -> Any:
    """Move a dimension of all tensors that have it: to the front as views, back contiguous."""
    if source == destination:
        return value
    has_dim = getattr(value, "ndim", 0) > max(source, destination)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        moved = value.movedim(source, destination) if has_dim else value
        return moved if destination == 0 else moved.contiguous()
    if has_dim:  # a NumPy array, or a tensor that cannot be split
        raise splitting.BatchSplitError(f"batch_dim= splits tensors only, got {splitting.describe(value)}. {_WAY}")
    parts = splitting.take_apart(value)
    return value if parts is None else parts.build([_move_dim(part, source, destination) for part in parts.values])


_MAX_SHAPES = 1024  # text of all lengths makes a new one every few batches


@dataclass
class _Fit:
    """What is known about one shape."""

    size: int | None  # samples per micro-batch; ``None`` for the whole batch
    num_good: int = 0  # batches in a row that fit


class MicroBatchSizes:
    """Sizes that fit, by shape of batch; or ``size``, if it is given.

    A shape not met yet starts with the whole batch, unless a micro-batch with as many elements has already failed:
    then with the first half, quarter and so on that has fewer. After ``regrow_after_n_batches`` batches of a shape in a
    row (``None``: never) the double size is tried again, and after twice as many the next time it fails.
    """

    def __init__(self, regrow_after_n_batches: int | None, size: int | None = None) -> None:
        self._size = size
        self.retries = size is None  # whether a batch that ran out of memory runs again
        self._regrow_after = self._patience = regrow_after_n_batches
        self._fits: dict[str, _Fit] = {}
        self._failing_elements: int | None = None  # the smallest micro-batch that failed
        self._tried: tuple[str, int | None] | None = None  # the larger size under way

    def propose(self, shape: str, num_samples: int, num_elements: int) -> int | None:
        """How many samples to run at once; ``None`` for all of them."""
        if self._size is not None:
            return self._size
        fit = self._fits.get(shape)
        self._tried = None
        if fit is None:
            guess: int | None = None
            if self._failing_elements is not None and num_elements >= self._failing_elements:
                guess = num_samples
                while guess > 1 and guess * num_elements >= self._failing_elements * num_samples:
                    guess = (guess + 1) // 2
            fit = self._fits[shape] = _Fit(guess)
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
        self._fits.setdefault(shape, _Fit(size)).num_good += 1
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


_WHOLE = 2**62  # samples; larger than any batch


@dataclass(frozen=True)
class Agreed:
    """What all ranks do with their batches."""

    size: int  # samples per micro-batch
    count: int | None  # how many micro-batches every rank runs; ``None`` where ranks may differ


class AgreedSizes:
    """Ranks propose, the smallest size holds; one runs out of memory, all of them halve."""

    def __init__(self, chooser: MicroBatchSizes, agreement: RankAgreement | None, *, has_equal_counts: bool) -> None:
        self._chooser = chooser
        self.retries = chooser.retries
        self._agreement = agreement  # between the ranks; ``None`` if there is one, or each decides for itself
        self.has_equal_counts = has_equal_counts  # whether all ranks must run the same number of micro-batches
        self._largest_batch = 0

    def start(self, facts: BatchFacts) -> Agreed:
        """Choose for a batch. A collective, unless sizes are fixed and counts free."""
        proposed = self._chooser.propose(facts.shape, facts.num_samples, facts.num_elements)
        size = _WHOLE if proposed is None else proposed
        self._largest_batch = facts.num_samples
        if self._agreement is not None and (self.retries or self.has_equal_counts):
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
        if self.retries:
            size = agreed.size if agreed.size < facts.num_samples else None
            self._chooser.note_success(facts.shape, size, facts.elements_of(agreed.size))

    def _agreed(self, size: int) -> Agreed:
        return Agreed(size, -(-self._largest_batch // size) if self.has_equal_counts else None)


class NormCounting:
    """One batch in parts, in a context: each moves the running statistics by its share, together they count as one.

    With momentum m the statistics s become (1 - m) s + m x. A part with share w does so with 1 - (1 - m)^w: together
    they forget as much of s as the whole batch would. The normalisation itself still sees one part at a time.
    """

    def __init__(self, module: nn.Module, num_samples: int) -> None:
        self._num_samples = num_samples
        self._momentum = NormMomentum(module)
        self._counts: list[tuple[Tensor, Tensor]] = [
            (norm.num_batches_tracked, norm.num_batches_tracked.clone())
            for norm in module.modules()
            # A cumulative average (momentum=None) takes its factor from this count, and every part counts.
            if isinstance(norm, NormBase) and norm.num_batches_tracked is not None and norm.momentum is not None
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._momentum.restore()
        if kind is None:
            with torch.no_grad():
                for count, before in self._counts:
                    count.copy_(torch.where(count > before, before + 1, before))

    def begin_part(self, size: int, share: float) -> None:
        """The next part has so many samples; its share of the loss does not count."""
        self._momentum.scale(size / self._num_samples)
