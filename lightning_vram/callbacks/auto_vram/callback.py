"""Choose the memory optimizations of a run before it starts, and apply them."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice
from lightning_vram.callbacks import hook_points
from lightning_vram.callbacks.auto_vram.decision import (
    NAME,
    AppliedPlan,
    FirstSteps,
    PlanRequest,
    can_repeat_step,
    decide,
    faster_scheme,
    plan_folder,
)
from lightning_vram.core.ranks import RankAgreement
from lightning_vram.estimation.batches import count_elements, largest_shape
from lightning_vram.estimation.fake_trainer import RunCallbacks, check_run_callbacks
from lightning_vram.estimation.running_trainer import AUTO, check_limit, decide_together, forget_shared, limit_bytes
from lightning_vram.memory.device.accelerators import ProcessLimit, can_limit, counts_peaks, limited_share
from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.scheme import LEVELS, Exactness, Part, Scheme
from lightning_vram.planner.search import CHECKPOINTING, may_be_guarded
from lightning_vram.report.progress import show_progress

_BUDGET = f"{NAME}(budget)"
_BETWEEN_RUNS = dict.fromkeys(("_plan", "_first_steps", "_limit"))
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class AutoVRAM(Callback):
    """Choose the fastest configuration of memory optimizations that fits the device, and apply it.

    At the start of ``fit`` training steps of this Trainer are traced on fake tensors, with this module and the largest
    of the first 8 batches: first the baseline, then combinations of features of this package. The fastest configuration
    that fits is applied for the fit, and a table of the configurations tried is logged. A run that fits stays
    unchanged. Features that the user has configured stay, and the plan is built around them. After the fit Trainer and
    module are unchanged. A batch that is larger than the planned one causes one warning.

    If a step runs out of memory in spite of the plan, on one device and with automatic optimization, the state before
    the step is restored, the plan is tightened, and the step is repeated.

    Rank zero plans for the rank with the least free memory, and all ranks apply the same plan. A callback cannot
    replace the strategy: if only ``strategy="fsdp_offload"`` would help, the message names it
    (:func:`lightning_vram.plan_memory` includes strategies). If the step cannot be traced or the data cannot be read
    twice, the run starts unchanged; with a given budget, repeated layers are checkpointed from the first step, and on
    an accelerator PyTorch is limited to the budget. On one device a step that runs out of memory is then repeated with
    checkpointed layers or micro-batches.

    Planning stops after 30 s or a tenth of the first epoch, whichever is longer, and the fastest configuration found by
    then is taken. The plan is saved in ``auto_vram/`` next to the logs, and reused by the next run whose step needs the
    same memory and time, with the same features, device and versions.

    Args:
        budget: Device memory that the run may use: bytes as an ``int`` or as ``"20GiB"``, or a share of the device
            between 0 and 1. ``"auto"``: the free memory when ``fit`` begins, minus 3 %.
        allow: How the trained weights compare with the baseline. ``"exact"``: bitwise identical. ``"lossless"``: equal
            up to floating-point rounding. ``"any"``: approximate; gradients, moments and frozen weights may differ by a
            bounded error.
        replan: Whether to correct the plan once, with the measured first steps. Not on Apple GPUs, which count no
            peaks.
        run_callbacks: The user's own callbacks that planning runs, by class or name: those that change the module or
            the step. Loggers, checkpoints, progress bars and other callbacks are skipped.
        cache: Whether to reuse plans of earlier runs, which takes one traced step, and to save this one. ``False``
            leaves the folder alone.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If ``budget`` is neither a size above 0 nor a share, or ``allow`` is unknown.
        MisconfigurationException: In ``setup``, on all ranks, if no configuration fits a given budget, or if one
            Trainer has several.

    Attributes:
        budget_bytes: The budget of the last fit, in bytes; ``None`` before the first fit, or if it was not planned.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import AutoVRAM
        >>> trainer = pl.Trainer(callbacks=[AutoVRAM("20GiB")], logger=False)
    """

    takes_no_memory = True  # an estimate leaves it out
    uses_gradients = False  # so that optimizers may step before: see FSDPOffloadStrategy

    _plan: AppliedPlan | None = None
    _first_steps: FirstSteps | None = None
    _limit: ProcessLimit | None = None

    def __init__(
        self,
        budget: int | float | str = AUTO,
        allow: str = "exact",
        *,
        replan: bool = True,
        run_callbacks: RunCallbacks = (),
        cache: bool = True,
    ) -> None:
        check_limit(_BUDGET, budget)
        check_choice(f"{NAME}(allow)", allow, LEVELS)
        check_bool(f"{NAME}(replan)", replan)
        check_bool(f"{NAME}(cache)", cache)
        self.budget = budget
        self.allow = allow
        self.replan = replan
        self.run_callbacks = check_run_callbacks(f"{NAME}(run_callbacks)", run_callbacks)
        self.cache = cache
        self.budget_bytes: int | None = None
        self._level = LEVELS[allow]
        self._most_elements: int | None = None  # of batches that need no warning

    @property
    def scheme(self) -> Scheme | None:
        """The configuration applied in the current fit; ``None`` between fits."""
        return None if self._plan is None else self._plan.scheme

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        hook_points.check_trainer(NAME, trainer)
        self._end()  # another callback's error may have cut the end of the last run short
        if stage != "fit":
            return
        hook_points.refuse_several(
            trainer, AutoVRAM, f"{NAME} can be used once, got several: one device has one budget."
        )
        limit = limit_bytes(_BUDGET, self.budget, trainer.strategy.root_device)
        guards = [self._make_guard(trainer)] if can_repeat_step(trainer) else []
        folder = plan_folder(trainer) if self.cache else None
        with show_progress(trainer) as on_progress:
            decision = decide_together(
                trainer,
                pl_module,
                limit,
                hook_points.rank_timeout(trainer),
                partial(decide, PlanRequest(self._level, self.budget, guards, folder, on_progress)),
                run_callbacks=self.run_callbacks,
            )
        if decision.kind == "error":
            raise MisconfigurationException(decision.message)
        owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))  # may change batches of the loaders
        is_changed = any(is_overridden(hook, owner) for owner in owners for hook in _TRANSFER_HOOKS)
        self._most_elements = None if is_changed else decision.num_elements
        self.budget_bytes = decision.budget_bytes or None
        is_guarded = decision.is_tight and may_be_guarded(part.name for part in decision.scheme.parts)
        self._plan = AppliedPlan(trainer, decision, guards if is_guarded else [])
        if decision.kind == "fallback":
            is_guarded &= bool(guards)
            hook_points.before_strategy_setup(trainer, partial(self._fall_back, trainer, self._plan, limit, is_guarded))
        else:
            (rank_zero_info if decision.kind == "info" else rank_zero_warn)(decision.message)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        forget_shared(trainer)
        device, plan = trainer.strategy.root_device, self._plan
        if self.replan and plan is not None and plan.decision.found and plan.scheme.parts and counts_peaks(device):
            self._first_steps = FirstSteps(device)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._first_steps is not None:
            self._first_steps.begin_batch()
        if self._most_elements is not None and count_elements(batch) > self._most_elements:
            self._most_elements = None  # warns once
            rank_zero_warn(
                f"{NAME}: a batch of shape {list(largest_shape(batch))} is larger than the batch the run was planned "
                "for. It may need more memory."
            )

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        took = None if self._first_steps is None else self._first_steps.end_batch()
        if took is not None and self._plan is not None:
            self._first_steps = None
            _correct(self._plan, RankAgreement(hook_points.rank_timeout(trainer)), *took)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        hook_points.withdraw_from_strategy_setup(trainer)
        self._end(exception)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _BETWEEN_RUNS}  # a copy has no run

    def _end(self, exception: BaseException | None = None) -> None:
        plan, limit = self._plan, self._limit
        vars(self).update(_BETWEEN_RUNS)
        if limit is not None:
            limit.remove()
        if plan is not None:
            plan.end(exception)

    def _make_guard(self, trainer: pl.Trainer) -> Callback:
        """Make the callback that repeats a step after an OOM."""
        guard = Part("lightning_vram.MicroBatching").make()
        note = f"{NAME}: no tighter plan is left."
        if self._level == Exactness.EXACT:
            note += " allow='lossless' would split the batch into micro-batches."
        guard.relief = hook_points.OutOfMemoryRelief(self._tighten, self._level >= Exactness.LOSSLESS, note)
        return guard  # type: ignore[no-any-return]

    def _tighten(self) -> bool:
        scheme = None if self._plan is None else self._plan.tighter()
        if self._plan is None or scheme is None or not self._plan.change(scheme):
            return False
        rank_zero_warn(f"{NAME}: a step ran out of memory in spite of the plan. It is repeated with {scheme}.")
        return True

    def _fall_back(self, trainer: pl.Trainer, plan: AppliedPlan, limit: int | None, is_guarded: bool) -> None:  # noqa: FBT001
        """Apply what needs no trace, now that all layers exist."""
        device = trainer.strategy.root_device
        is_checkpointed = not plan.may_checkpoint or plan.change(plan.scheme + CHECKPOINTING)
        done = [
            "repeated layers are checkpointed" if is_checkpointed else "no repeated layers to checkpoint were found"
        ]
        if is_guarded and self._level >= Exactness.LOSSLESS:
            done.append("a batch that runs out of memory is split into micro-batches")
        if limit is not None:
            if can_limit(device) and limited_share(device) == 1:  # another limit stays
                self._limit = ProcessLimit(device, limit)
            how = "is not enforced" if self._limit is None else "is enforced"
            done.append(f"the limit of {format_bytes(limit)} on {device} {how}")
        reason = plan.decision.message
        rank_zero_warn(f"{NAME} cannot plan this run: {reason}.\nThe run continues without a plan: {', '.join(done)}.")


def _correct(plan: AppliedPlan, ranks: RankAgreement, seconds: float, reserved_bytes: int) -> None:
    """Plan again, by the largest measurement of all ranks. A collective."""
    found, budget_bytes = plan.decision.found, plan.decision.budget_bytes
    assert found is not None  # else nothing was measured
    try:
        nanoseconds, reserved_bytes = ranks.largest(int(seconds * 1e9), reserved_bytes)
    finally:
        ranks.close()
    scheme = faster_scheme(found, plan.scheme, budget_bytes, nanoseconds / 1e9)
    if reserved_bytes > budget_bytes:
        scheme = plan.tighter()
    is_changed = scheme is not None and plan.change(scheme)
    rank_zero_info(
        f"{NAME}: a step takes {nanoseconds / 1e6:.1f} ms and reserves {format_bytes(reserved_bytes)} of the "
        f"{format_bytes(budget_bytes)}. {f'The run continues with {scheme}.' if is_changed else 'The plan is kept.'}"
    )
