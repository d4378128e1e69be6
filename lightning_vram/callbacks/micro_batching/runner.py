"""Run a step in micro-batches, and again in smaller ones where memory ran out: on all ranks together.

Nothing of an attempt that ran out of memory stays: its graph, its gradients, what it wrote into buffers, metrics and
attributes, what it logged and drew from the generators. So the run goes on as if it had used the smaller micro-batches
from the start.
"""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_vram.callbacks.hook_points import OutOfMemoryRelief
from lightning_vram.callbacks.micro_batching.metrics_and_logging import BatchLogging, MetricStates
from lightning_vram.core.batches.contents import BatchSplitError
from lightning_vram.core.batches.micro_batches import BatchGuard, BatchWeight, hand_back, shares_of
from lightning_vram.core.batches.splitting import BatchCutter, BatchFacts
from lightning_vram.core.gradients import GradientState, has_collectives_in_forward
from lightning_vram.core.module_state import BufferCopies
from lightning_vram.core.ranks import RankAgreementError
from lightning_vram.core.rollback import StepState
from lightning_vram.memory.device.accelerators import empty_cache, has_cache
from lightning_vram.memory.device.out_of_memory import is_out_of_memory, release_frames
from lightning_vram.private_names.lightning import running_results
from lightning_vram.techniques.micro_batching import PROBED_SIZES, Agreed, AgreedSizes, NormCounting, SizePlanning
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


class MicroBatchAttempt:
    """Runs the micro-batches of a batch, once."""

    def __init__(
        self,
        trainer: pl.Trainer,
        metrics: MetricStates,
        guard: BatchGuard,
        *,
        is_training: bool,
        is_again: bool = False,  # whether an attempt of the same batch ran out of memory before
    ) -> None:
        self._trainer = trainer
        self._module = trainer.lightning_module
        results = running_results(trainer)
        self._logging = BatchLogging(results) if results is not None else None
        self._metrics = metrics
        self._guard = guard
        self._is_training = is_training
        self._norms: NormCounting | None = None
        self.is_again = is_again
        self._number = self._num_parts = 1  # of the part under way, and of all

    def run(self, micro_batches: Sequence[MicroBatch], step: Step[Output]) -> list[tuple[MicroBatch, Output]]:
        """Run ``step`` on each of them; returns what it returned, without the idle ones."""
        parts = [part for part in micro_batches if not part.is_idle]
        num_samples = sum(part.size for part in parts)
        self._num_parts = len(parts)
        self._metrics.begin(len(parts))
        if self._is_training and len(parts) > 1:
            self._norms = NormCounting(self._module)
        outputs = []
        with self._logging or nullcontext():
            for number, part in enumerate(micro_batches, 1):
                self._number = min(number, len(parts))  # the idle ones repeat the last part
                if part.is_idle:
                    self._run_idle(part, step)
                    continue
                self._metrics.start_micro_batch(part.share)
                if self._logging is not None:
                    self._logging.start_micro_batch(part.size, part.share)
                if self._norms is not None:
                    self._norms.begin_part(part.size / num_samples)
                lent = replace(part, batch=self._guard.lend(part.batch))
                outputs.append((lent, step(lent)))
        return outputs

    def keep(self) -> None:
        """Let it count. A collective if the user logs with ``sync_dist=True``."""
        self._guard.settle()
        if self._norms is not None:
            self._norms.finish()
        self._metrics.finish()
        if self._logging is not None:
            self._logging.replay()

    def drop(self) -> None:
        """Undo what it left in norms and metrics. Calling it again does nothing."""
        if self._norms is not None:
            self._norms.restore()
        self._metrics.restore()

    def add_note(self, error: BaseException) -> None:
        """Note on an error of the model that splitting may be the cause. The type of the error does not change."""
        is_of_cut = isinstance(error, BatchSplitError) or not isinstance(error, Exception) or is_out_of_memory(error)
        if self._num_parts == 1 or is_of_cut:
            return
        error.add_note(
            f"MicroBatching: this error is from micro-batch {self._number} of {self._num_parts}. If the whole "
            "batch runs without it, splitting is the cause, for example with a batch padded to its longest "
            "sample. Trim each micro-batch in MicroBatching(split=...), or in split_batch(batch, size) of the "
            "LightningModule. Name entries that belong to all samples in shared_keys=."
        )

    def _run_idle(self, part: MicroBatch, step: Step[Output]) -> None:
        device = self._trainer.strategy.root_device
        state = StepState(self._module, device, BufferCopies(), skip=lambda member: isinstance(member, Metric))
        metrics = MetricStates(self._module)
        metrics.begin(1)
        results = running_results(self._trainer)
        with BatchLogging(results) if results is not None else nullcontext():  # without replay
            try:
                step(replace(part, batch=self._guard.lend(part.batch)))
            finally:
                metrics.restore()
                state.restore()


class StepUndo:
    """Saves what a step may change, except metrics and logged values, which each attempt restores."""

    def __init__(self, trainer: pl.Trainer, guard: BatchGuard) -> None:
        self._module = trainer.lightning_module
        self._device = trainer.strategy.root_device
        self._guard = guard
        self._buffers = BufferCopies()
        self._parameters: list[Tensor] = []
        self._gradients: GradientState | None = None

    def remember(self, batch: Any, parameters: list[Tensor]) -> Callable[[], None]:
        """Save all but gradients; returns what restores the state, as often as it is called."""
        self._parameters, self._gradients = parameters, None
        try:
            return self._take(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self._release_memory()  # outside of the handler: the error holds on to the copies made so far
        return self._take(batch)

    def remember_gradients(self) -> None:
        """Save gradients once per step: before the first backward and after zeroing, when there are none to copy."""
        if self._gradients is None:
            self._gradients = GradientState(self._parameters)

    def forget_gradients(self) -> None:
        """Free the copies: the step counts, and the optimizer needs the memory."""
        self._gradients = None

    def _take(self, batch: Any) -> Callable[[], None]:
        state = StepState(self._module, self._device, self._buffers, skip=lambda member: isinstance(member, Metric))
        self._guard.watch(batch)

        def undo() -> None:
            self._guard.check()
            discard_failed_iteration(self._module)
            if self._gradients is not None:
                self._gradients.restore()
            state.restore()
            self._release_memory()

        return undo

    def _release_memory(self) -> None:
        gc.collect()
        if has_cache(self._device):
            empty_cache(self._device)


_SILENCE_SECONDS = 60.0  # and ten times what the longest attempt took: ranks began it together


class MicroBatchRunner:
    """Runs one kind of step of a trainer: training, or evaluation."""

    def __init__(  # noqa: PLR0913 - by name
        self,
        trainer: pl.Trainer,
        cutter: BatchCutter,
        sizes: AgreedSizes,
        weight: BatchWeight | Literal["sum"] | None,
        *,
        is_training: bool,
        planning: SizePlanning | None = None,
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
        self._planning = planning
        self._metrics = MetricStates(trainer.lightning_module)
        self._guard = BatchGuard()
        self._undo = StepUndo(trainer, self._guard)
        self._longest_seconds = 0.0
        self._has_warned = False
        self.size: int | None = None  # samples per micro-batch in the last batch; None if it could not be cut
        self.num_retries = 0
        self.reduces_by_hand = False

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
        parameters = list(find_parameters()) if self.retries else []
        if self._planning is not None and not self._planning.is_probed:
            undo_probe = self._undo.remember(batch, parameters)
            self._undo.remember_gradients()  # of an earlier fit: nothing zeroes them before
            self._probe(self._planning, batch, facts, step)
            undo_probe()
        undo = self._remember(batch, parameters, zeroes=zeroes)
        agreed = self._sizes.start(facts, self._planning.limit(facts) if self._planning is not None else None)
        num_retries = self.num_retries
        while True:
            attempt = self._make_attempt(is_again=self.num_retries > num_retries)
            started = time.monotonic()
            outputs, error = self._attempt(attempt, step, partial(self._cut, batch, facts, agreed), agreed.size)
            if not self.retries or not self._has_failed(error, started):
                break
            assert undo is not None
            has_freed = self._free_memory(error)
            if not has_freed and (agreed.size == 1 or (self._relief is not None and not self._relief.may_cut)):
                raise self._give_up(error, facts.why_whole)
            attempt.drop()
            undo()
            agreed = agreed if has_freed else self._shrink(facts, agreed, error)
        self._undo.forget_gradients()
        attempt.keep()
        if len(outputs) == 1:
            hand_back(batch, outputs[0][0].batch)
        self._sizes.settle(facts, agreed)
        self.size = min(agreed.size, facts.num_samples) if facts.why_whole is None else None
        return outputs

    def remember_gradients(self) -> None:
        """Save gradients; a step calls it before its first backward."""
        if self.retries:
            self._undo.remember_gradients()

    def _remember(self, batch: Any, parameters: list[Tensor], *, zeroes: bool) -> Callable[[], None] | None:
        undo = self._undo.remember(batch, parameters) if self.retries else None
        if not zeroes:  # a forward that fails makes FSDP2 drop those of the batches before
            self.remember_gradients()
        return undo

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

    def _make_attempt(self, *, is_again: bool = False) -> MicroBatchAttempt:
        is_training = self._is_training
        return MicroBatchAttempt(self._trainer, self._metrics, self._guard, is_training=is_training, is_again=is_again)

    def _probe(self, planning: SizePlanning, batch: Any, facts: BatchFacts, step: Step[Output]) -> None:
        """Run a few small micro-batches that are dropped."""
        for size in PROBED_SIZES:
            attempt = self._make_attempt()
            part, size = self._cutter.cut(batch, facts, size)[0]
            idle = MicroBatch(part, size, 1.0, 1.0, is_first=False, is_last=False, is_idle=True)
            started = time.monotonic()
            with planning.watching(facts.elements_of(size)):
                error = self._run_probe(attempt, idle, step)
            if self._has_failed(error, started):
                planning.give_up(is_too_large=error is not None and is_out_of_memory(error))
                break
        planning.is_probed = True

    def _run_probe(self, attempt: MicroBatchAttempt, part: MicroBatch, step: Step[Output]) -> Exception | None:
        """Run a micro-batch that the user did not ask for: no error in it ends the run."""
        try:
            attempt.run([part], step)
        except Exception as error:
            release_frames(error)
            return error
        finally:
            attempt.drop()
        return None

    def _attempt(
        self, attempt: MicroBatchAttempt, step: Step[Output], cut: Callable[[], list[MicroBatch]], size: int
    ) -> tuple[list[tuple[MicroBatch, Output]], Exception | None]:
        """Returns an out-of-memory error rather than raising it: its traceback would keep the graph alive."""
        try:
            return attempt.run(cut(), step), None
        except BaseException as error:
            attempt.drop()
            if not self.retries or not isinstance(error, Exception) or not is_out_of_memory(error):
                if attempt.is_again:
                    error.add_note(f"MicroBatching ran {size} samples at once here, because more ran out of memory.")
                attempt.add_note(error)
                raise
            if size > 1:  # of a single sample it is what the user gets to see
                release_frames(error)
            return [], error

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
        if error is not None and self._sizes.has_equal_counts:  # ranks that did not fail at the same place cannot come
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

    def _free_memory(self, error: Exception | None) -> bool:
        if self._relief is None or not self._relief.release_memory():
            return False
        if error is not None:
            release_frames(error)  # they hold the graph
        return True

    def _shrink(self, facts: BatchFacts, agreed: Agreed, error: Exception | None) -> Agreed:
        self.num_retries += 1
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


def why_counts_must_be_equal(trainer: pl.Trainer, *, is_training: bool) -> str | None:
    """Say where ranks wait for one another inside a step, if they do."""
    if trainer.world_size == 1:
        return None
    module = trainer.lightning_module
    if any(isinstance(member, Metric) and member.dist_sync_on_step for member in module.modules()):
        return "a metric with dist_sync_on_step=True"
    return has_collectives_in_forward(module, is_training=is_training)
