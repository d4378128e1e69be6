"""Run a step in micro-batches, and again in smaller ones where memory ran out: on all ranks together.

Nothing of an attempt that ran out of memory stays, so the run goes on as if it had used the smaller micro-batches from
the start.
"""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_vram.callbacks.hook_points import OutOfMemoryRelief
from lightning_vram.callbacks.micro_batching.step_state import BatchLogging, ShownValues, StepState
from lightning_vram.core.batches.micro_batches import BatchWeight
from lightning_vram.core.batches.splitting import BatchSplitError
from lightning_vram.core.gradients import has_collectives_in_forward
from lightning_vram.core.ranks import RankAgreementError
from lightning_vram.memory.device.accelerators import empty_cache, has_cache
from lightning_vram.memory.device.out_of_memory import is_out_of_memory, release_frames
from lightning_vram.private_names.lightning import running_results
from lightning_vram.techniques.micro_batching import Agreed, AgreedSizes, BatchCutter, BatchFacts, NormCounting
from lightning_vram.techniques.sharding import discard_failed_iteration

Output = TypeVar("Output")


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch."""

    batch: Any  # views of the batch
    size: int  # number of samples
    share: float  # weight in means
    factor: float  # of the loss
    is_first: bool
    is_last: bool
    is_idle: bool = False  # runs because other ranks have one more, and counts for nothing
    batch_dim: int = 0


Step = Callable[[MicroBatch], Output]
_SILENCE_SECONDS = 60.0  # and ten times what the longest attempt took: ranks began it together


class MicroBatchRunner:
    """Runs one kind of step of a trainer: training, or evaluation."""

    def __init__(
        self,
        trainer: pl.Trainer,
        cutter: BatchCutter,
        sizes: AgreedSizes,
        weight: BatchWeight | Literal["sum"] | None,
        *,
        is_training: bool,
        relief: OutOfMemoryRelief | None = None,  # is tried before a batch is cut
    ) -> None:
        self._trainer = trainer
        self._relief = relief
        self._cutter = cutter
        self._sizes = sizes
        self.retries = sizes.retries  # whether a batch that ran out of memory runs again
        self.has_equal_counts = sizes.has_equal_counts  # of micro-batches, on all ranks, forward and backward
        self._losses_are_sums = weight == "sum"
        self._weight = None if isinstance(weight, str) else weight
        self.weighs = self._weight is not None  # whether a micro-batch may have weight 0
        self._is_training = is_training
        self._state = StepState(trainer.lightning_module, trainer.strategy.root_device)
        self._longest_seconds = 0.0
        self._has_warned = False
        self.size: int | None = None  # samples per micro-batch in the last batch; None if it could not be cut

    def run(
        self,
        batch: Any,
        step: Step[Output],
        find_parameters: Callable[[], Iterable[Tensor]] = tuple,
        *,
        zeroes: bool = True,
    ) -> list[tuple[MicroBatch, Output]]:
        """Run ``step`` (forward, and backward if there is one) on every micro-batch of ``batch``; return both."""
        facts = self._measure(batch)
        if self.retries:
            self._state.take(batch, list(find_parameters()))
            if not zeroes:  # a forward that fails makes FSDP2 drop those of the batches before
                self._state.take_gradients()
        agreed = self._sizes.start(facts)
        while True:
            started = time.monotonic()
            results = running_results(self._trainer)
            logging = BatchLogging(results) if results is not None else None
            outputs, error = self._attempt(batch, facts, agreed, step, logging)
            if not self.retries or not self._has_failed(error, started):
                break
            has_freed = self._relief is not None and self._relief.release_memory()
            if not has_freed and (agreed.size == 1 or (self._relief is not None and not self._relief.may_cut)):
                raise self._give_up(error, facts.why_whole)
            self._undo(error)
            agreed = agreed if has_freed else self._shrink(facts, agreed, error)
        self._state.settle()
        if logging is not None:
            logging.replay()
        if len(outputs) == 1:
            _hand_back(batch, outputs[0][0].batch)
        self._sizes.settle(facts, agreed)
        self.size = min(agreed.size, facts.num_samples) if facts.why_whole is None else None
        return outputs

    def take_gradients(self) -> None:
        """Save gradients; a step calls it before its first backward."""
        if self.retries:
            self._state.take_gradients()

    def _measure(self, batch: Any) -> BatchFacts:
        if not self.retries:
            return self._cutter.measure(batch)
        facts = self._cutter.measure_or_keep_whole(batch)
        if facts.why_whole is not None and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                "MicroBatching('auto') cannot split this batch. It runs the batch whole, and cannot help after "
                f"an out-of-memory error. {facts.why_whole}"
            )
        return facts

    def _undo(self, error: Exception | None) -> None:
        if error is not None:
            release_frames(error)  # they hold the graph
        discard_failed_iteration(self._trainer.lightning_module)
        self._state.restore()
        gc.collect()
        device = self._trainer.strategy.root_device
        if has_cache(device):
            empty_cache(device)

    def _attempt(
        self, batch: Any, facts: BatchFacts, agreed: Agreed, step: Step[Output], logging: BatchLogging | None
    ) -> tuple[list[tuple[MicroBatch, Output]], Exception | None]:
        """Returns an out-of-memory error rather than raising it: its traceback would keep the graph alive."""
        try:
            return self._run_parts(self._cut(batch, facts, agreed), step, logging), None
        except Exception as error:
            if not self.retries or not is_out_of_memory(error):
                raise
            if agreed.size > 1:  # of a single sample it is what the user gets to see
                release_frames(error)
            return [], error

    def _run_parts(
        self, parts: Sequence[MicroBatch], step: Step[Output], logging: BatchLogging | None
    ) -> list[tuple[MicroBatch, Output]]:
        """Return what ``step`` returned of each part, without the idle ones."""
        module = self._trainer.lightning_module
        counted = [part for part in parts if not part.is_idle]
        listeners: list[BatchLogging | ShownValues | NormCounting] = [logging] if logging is not None else []
        if len(counted) > 1 or self.retries:  # a metric would hold the graph of a failed try
            listeners.append(ShownValues(module))
        if len(counted) > 1 and self._is_training:
            listeners.append(NormCounting(module, sum(part.size for part in counted)))
        outputs = []
        with ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
            for number, part in enumerate(counted, 1):
                for listener in listeners:
                    listener.begin_part(part.size, part.share)
                lent = replace(part, batch=self._state.lend(part.batch))
                try:
                    outputs.append((lent, step(lent)))
                except Exception as error:
                    _note_part(error, number, len(counted))
                    raise
            for part in parts[len(counted) :]:
                self._run_idle(part, step)
        return outputs

    def _run_idle(self, part: MicroBatch, step: Step[Output]) -> None:
        state = StepState(self._trainer.lightning_module, self._trainer.strategy.root_device).take()
        results = running_results(self._trainer)
        with BatchLogging(results) if results is not None else nullcontext():  # without replay
            try:
                step(replace(part, batch=self._state.lend(part.batch)))
            finally:
                state.restore()

    def _cut(self, batch: Any, facts: BatchFacts, agreed: Agreed) -> list[MicroBatch]:
        is_whole = agreed.size >= facts.num_samples and not self.retries
        parts = [(batch, facts.num_samples)] if is_whole else self._cutter.cut(batch, facts, agreed.size)
        shares = self._find_shares([part for part, _ in parts], [size for _, size in parts])
        num_idle = max(0, agreed.count - len(parts)) if agreed.count is not None else 0
        last = len(parts) - 1 + num_idle
        factors = [1.0] * len(parts) if self._losses_are_sums else shares
        dim = self._cutter.batch_dim
        micro_batches = [
            MicroBatch(part, size, share, factors[number], is_first=number == 0, is_last=number == last, batch_dim=dim)
            for number, ((part, size), share) in enumerate(zip(parts, shares, strict=True))
        ]
        part, size = parts[-1]
        for number in range(len(parts), last + 1):
            micro_batches.append(MicroBatch(part, size, 0.0, 0.0, is_first=False, is_last=number == last, is_idle=True))
        return micro_batches

    def _find_shares(self, parts: Sequence[Any], sizes: Sequence[int]) -> list[float]:
        try:
            return shares_of(parts, sizes, self._weight)
        except (AttributeError, LookupError, TypeError, ValueError):
            if self._is_training:
                raise
            return shares_of(parts, sizes, None)  # such as batches to predict, which have no labels

    def _has_failed(self, error: Exception | None, started: float) -> bool:
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - started)
        timeout = None  # a rank may be slow, to compile, say
        if error is not None and self.has_equal_counts:  # ranks that did not fail at the same place cannot come
            timeout = timedelta(seconds=_SILENCE_SECONDS + 10 * self._longest_seconds)
        try:
            return self._sizes.has_failed(here=error is not None, timeout=timeout)
        except RankAgreementError as silence:
            if error is None:
                raise
            reason = why_counts_must_be_equal(self._trainer, is_training=self._is_training)
            error.add_note(
                "MicroBatching cannot retry with smaller micro-batches: this rank ran out of memory, and other "
                f"ranks wait for it in a collective ({reason}). Start with a smaller size=."
            )
            raise error from silence

    def _shrink(self, facts: BatchFacts, agreed: Agreed, error: Exception | None) -> Agreed:
        smaller = self._sizes.halve(facts, agreed, here=error is not None)
        rank_zero_info(f"MicroBatching: out of memory with {agreed.size} samples at once, now {smaller.size}.")
        return smaller

    def _give_up(self, error: Exception | None, why_whole: str | None) -> Exception:
        """The error of one sample that does not fit; all ranks raise, each knows the same."""
        if self._relief is not None and not self._relief.may_cut:
            error = error or RuntimeError("Another rank ran out of memory; see its error.")
            error.add_note(self._relief.note)
            return error
        message = "MicroBatching: out of memory with one sample per micro-batch; the batch cannot be split further."
        if error is None:
            return RuntimeError(f"{message} This was on another rank; see its error.")
        if why_whole is not None:
            error.add_note(f"MicroBatching: out of memory in a batch that cannot be split. {why_whole}")
            return error
        way_out = "ActivationCheckpointing(), ActivationOffload()" if self._is_training else "smaller inputs"
        error.add_note(f"{message} Reduce the memory per sample: {way_out}.")
        return error


def _note_part(error: Exception, number: int, num_parts: int) -> None:
    """Note on an error of the model that splitting may be the cause. The type of the error does not change."""
    if num_parts == 1 or isinstance(error, BatchSplitError) or is_out_of_memory(error):
        return
    error.add_note(
        f"MicroBatching: this error is from micro-batch {number} of {num_parts}. If the whole batch runs without it, "
        "splitting is the cause, for example with a batch padded to its longest sample. Trim each micro-batch in "
        "MicroBatching(split=...), or in split_batch(batch, size) of the LightningModule. Name entries that belong to "
        "all samples in shared_keys=."
    )


def shares_of(parts: Sequence[Any], sizes: Sequence[int], weight: BatchWeight | None) -> list[float]:
    """Return how much each micro-batch counts in its batch, together 1: by samples without weights above zero."""
    by_samples = [size / sum(sizes) for size in sizes]
    if weight is None or len(parts) == 1:
        return by_samples
    weights = [weight(part) for part in parts]
    tensors = [one.detach().reshape(()) for one in weights if isinstance(one, Tensor)]
    values = iter(torch.stack(tensors).tolist() if tensors else ())  # the host blocks once for all of them
    numbers = [next(values) if isinstance(one, Tensor) else float(one) for one in weights]
    total = sum(numbers)
    return [one / total for one in numbers] if total > 0 else by_samples


def _hand_back(batch: Any, lent: Any) -> None:
    """Repeat in ``batch`` what a step added to, or removed from, the dict or list that it got instead."""
    if lent is batch:
        return
    if isinstance(batch, dict) and isinstance(lent, dict):
        batch.clear()
        batch.update(lent)
    elif isinstance(batch, list) and isinstance(lent, list):
        batch[:] = lent


def why_counts_must_be_equal(trainer: pl.Trainer, *, is_training: bool) -> str | None:
    """Say where ranks wait for one another inside a step, if they do."""
    if trainer.world_size == 1:
        return None
    module = trainer.lightning_module
    if any(isinstance(member, Metric) and member.dist_sync_on_step for member in module.modules()):
        return "a metric with dist_sync_on_step=True"
    return has_collectives_in_forward(module, is_training=is_training)
