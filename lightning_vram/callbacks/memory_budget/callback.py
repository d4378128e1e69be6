"""Check before a run whether it fits the device, so that it does not end hours later, or after minutes of loading.

Two steps of the same Trainer run on tensors without memory (``estimate_memory``), and what they need is held against
what the device has left. It costs the seconds of that estimate and saves no memory by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_vram.argument_checks import check_choice
from lightning_vram.callbacks.hook_points import check_trainer, rank_timeout, refuse_several
from lightning_vram.estimation import running_trainer
from lightning_vram.estimation.estimate import Estimator, Progress
from lightning_vram.estimation.fake_trainer import RunCallbacks, check_run_callbacks
from lightning_vram.estimation.traced_fit import reason_of
from lightning_vram.memory.device.accelerators import PeakWatch, ProcessLimit, can_limit, counts_peaks
from lightning_vram.memory.estimate.result import TRAIN, MemoryEstimate
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import SMALLER_BATCH
from lightning_vram.planner.scheme import Part
from lightning_vram.planner.search import bucket_views
from lightning_vram.report.estimate import verdict
from lightning_vram.report.progress import show_progress
from lightning_vram.report.tables import label

_LIMIT = "MemoryBudget(limit)"
_PER_SAMPLE = (Category.INPUTS, Category.ACTIVATIONS, Category.TEMPORARIES)
_HELPS_PER_SAMPLE = (SMALLER_BATCH, "MicroBatching('auto')", "ActivationCheckpointing()")
_HELPS_PER_PARAMETER = ("LeanMixedPrecision('bf16', parameters='bf16+split')",)
_ON_HOST = {_HELPS_PER_SAMPLE: "ActivationOffload()", _HELPS_PER_PARAMETER: "strategy='fsdp_offload'"}


_OF_A_RUN = ("_process_limit", "_watch", "_expected", "_first_step", "_bytes_of_others")


class MemoryBudget(Callback):
    """Check at the start of ``fit`` whether the run fits the device, before anything is moved there. Exact.

    Two training steps and one validation batch run on fake tensors, on copies of this Trainer's module, plugins,
    strategy and callbacks that change the step. If they need more memory than is available, a message reports the
    largest category, the largest batch size that fits, and features that help. After the first optimizer step on an
    accelerator, predicted and allocated memory are logged. Data are read from copies and random state is restored. If
    no estimate is possible (data that cannot be read twice, a step that needs tensor values, an unknown strategy),
    training continues with a warning.

    Rank zero estimates for the rank with the least free memory, and all ranks get the same answer. If the module
    creates its data itself, its ``setup`` is called once more, on a shallow copy. Nothing is stored in checkpoints.

    Args:
        limit: Memory that the run may use. ``"auto"``: free memory of the device when ``fit`` begins, including this
            process's cache. Bytes, as an ``int`` or as ``"20GiB"``, or a share of the device between 0 and 1: at most
            that; PyTorch's allocator is limited to it until the run ends.
        on_excess: Action if more is needed: ``"warn"`` or ``"error"``.
        run_callbacks: Your callbacks that the estimate must run, as classes or names: those that change the module or
            the step. Loggers, checkpoints, progress bars and others are left out.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``limit`` is neither a size above 0 nor a share, or ``on_excess`` is another word.
        MisconfigurationException: In ``setup``, on all ranks, if the run does not fit and ``on_excess`` is ``"error"``,
            or if the trainer has several.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import MemoryBudget
        >>> trainer = pl.Trainer(callbacks=[MemoryBudget("20GiB", on_excess="error")], logger=False)
    """

    takes_no_memory = True  # an estimate leaves it out
    uses_gradients = False  # so that optimizers may step before: see FSDPOffloadStrategy

    _process_limit: ProcessLimit | None = None
    _watch: PeakWatch | None = None
    _expected: Mapping[str, int] = MappingProxyType({})  # allocated bytes, by stage
    _first_step = 0
    _bytes_of_others = 0  # on the device before the run

    def __init__(
        self,
        limit: int | float | str = running_trainer.AUTO,
        *,
        on_excess: Literal["warn", "error"] = "warn",
        run_callbacks: RunCallbacks = (),
    ) -> None:
        running_trainer.check_limit(_LIMIT, limit)
        check_choice("MemoryBudget(on_excess)", on_excess, ("warn", "error"))
        self.limit = limit
        self.on_excess = on_excess
        self.run_callbacks = check_run_callbacks("MemoryBudget(run_callbacks)", run_callbacks)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer("MemoryBudget", trainer)
        self._end()  # a run whose end another callback's error cut short
        if stage != "fit":
            return
        message = "MemoryBudget can be used once, got several: a device has one budget. Remove all but one."
        refuse_several(trainer, MemoryBudget, message)
        device = trainer.strategy.root_device
        limit = running_trainer.limit_bytes(_LIMIT, self.limit, device)
        if limit is not None and can_limit(device):
            self._process_limit = ProcessLimit(device, limit)
        self._bytes_of_others = running_trainer.bytes_of_others(trainer, pl_module)
        with show_progress(trainer) as on_progress:
            judge = partial(_judge, on_progress)
            message, fits, self._expected = running_trainer.decide_together(
                trainer, pl_module, limit, rank_timeout(trainer), judge, run_callbacks=self.run_callbacks
            )
        if fits is False and self.on_excess == "error":
            self._end()
            raise MisconfigurationException(message)
        (rank_zero_info if fits else rank_zero_warn)(message)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        running_trainer.forget_shared(trainer)
        device = trainer.strategy.root_device
        if self._expected and counts_peaks(device):
            self._watch = PeakWatch(device)
            self._watch.restart()
            self._first_step = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._watch is None or trainer.global_step == self._first_step:
            return
        watch, self._watch = self._watch, None
        expected = self._expected[TRAIN if self._first_step else "first step"]  # a resumed run has its states already
        measured = watch.read().peak_allocated_bytes - self._bytes_of_others
        rank_zero_info(
            f"MemoryBudget: up to the first optimizer step, peak memory on {trainer.strategy.root_device} was "
            f"{format_bytes(measured)}; predicted: {format_bytes(expected)} "
            f"({(expected - measured) / max(1, measured):+.1%})."
        )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_A_RUN}

    def _end(self) -> None:
        if self._process_limit is not None:
            self._process_limit.remove()
        self.__dict__ = self.__getstate__()


def _judge(
    on_progress: Progress, read: Callable[[], running_trainer.RunningTrainer], _: int | None
) -> tuple[str, bool | None, Mapping[str, int]]:
    """Return a message, whether the run fits, and the bytes that will be allocated, by stage."""
    try:
        run = read()
        on_progress("tracing the step", 0.0)
        estimator = Estimator(run.module, run.batch, run.device, run.fit)
        estimate = estimator.estimate()
        if not estimate.fits:
            on_progress("searching for the largest batch", 0.3)
            largest = estimator.max_batch_size()
            estimate = replace(estimate, max_batch_size=largest.size, batch_size_refusal=largest.refusal)
    except Exception as error:  # a step on tensors without values may fail where the run does not
        message = f"MemoryBudget cannot estimate whether the run fits: {reason_of(error)}. Training continues."
        return message, None, {}
    expected = {name: stage.allocated_bytes for name, stage in estimate.stages.items()}
    message = f"MemoryBudget: {verdict(estimate)}."
    if not estimate.fits:
        message += f" {_advice(estimate, bucket_views(run.fit.trainer_arguments, run.fit.num_ranks))}"
    return message, estimate.fits, expected


def _advice(estimate: MemoryEstimate, views: Sequence[Part]) -> str:
    largest = max(estimate.by_category, key=lambda category: estimate.by_category[category])
    module, size = next(iter(estimate.by_module.items()), ("", 0))
    place = f"; the largest module is {module} with {format_bytes(size)}" if module else ""
    sentences = [f"Largest category: {label(largest)}, {format_bytes(estimate.by_category[largest])}{place}."]
    if estimate.max_batch_size is not None and estimate.batch_size:
        most = f"{estimate.max_batch_size} would fit" if estimate.max_batch_size else "and not even one fits"
        sentences.append(f"The batch has {estimate.batch_size} samples, {most}.")
    kind = _HELPS_PER_SAMPLE if largest in _PER_SAMPLE else _HELPS_PER_PARAMETER
    helps = [*(f"strategy={part.to_code()} with EarlyRelease()" for part in views), *kind]
    helps += [] if estimate.device.shares_host_memory else [_ON_HOST[kind]]
    listed = f"{', '.join(helps[:-1])} or {helps[-1]}" if len(helps) > 1 else helps[0]
    return " ".join([*sentences, f"What helps: {listed}."])
