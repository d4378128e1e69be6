"""Accumulate gradients over micro-batches so that every optimizer step is that of one big batch.

Lightning's own accumulation is exact for full windows of equal micro-batches with a factor that never changes. Here
every window is the mean over its micro-batches, also when the factor changes, at the end of an epoch, and where
micro-batches have different numbers of tokens. Windows that are weighted or not full cost one more pass over the
gradients.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_vram.argument_checks import check_bool
from lightning_vram.callbacks.accumulation_scheduler.check import (
    check_module,
    check_run,
    check_start,
)
from lightning_vram.callbacks.accumulation_scheduler.run import AccumulationRun
from lightning_vram.callbacks.accumulation_scheduler.target import Rounding, check_target, plan_factor
from lightning_vram.callbacks.accumulation_scheduler.weights import AccumulationWeights
from lightning_vram.callbacks.accumulation_scheduler.window import AccumulationWindow
from lightning_vram.callbacks.hook_points import FitTechnique
from lightning_vram.core.batches.weights import BatchWeight, WeightName, check_weight, make_batch_weight
from lightning_vram.techniques.accumulation_schedule import AccumulationSchedule, read_schedule

_WEIGHT = "AccumulationScheduler(weight)"


class AccumulationScheduler(FitTechnique):
    """Accumulate gradients by epoch, by optimizer step or up to an effective batch size, with correct means.

    Each optimizer step uses the mean over the micro-batches (batches of the dataloader) that it accumulated. An epoch's
    last step may have fewer; a ``training_step`` that returned ``None`` does not count. The factor changes only right
    after an optimizer step. Gradients are final before any ``on_before_optimizer_step`` hook and before clipping. Under
    DDP they are synchronized once per optimizer step.

    ``trainer.estimated_stepping_batches`` is the true number of optimizer steps, from ``LightningModule.setup`` on.
    ``trainer.accumulate_grad_batches`` is the current factor, and is restored after the fit. Tuners accumulate, too.

    A batch that is ``None`` counts as one of the factor, so that ranks stay in step; if it would be the last, the
    optimizer steps after the next batch. ``on_before_backward`` receives the loss times its weight, relative to the
    first. As always in Lightning, a scheduler with ``interval="step"`` and a ``frequency`` counts micro-batches.

    The factor is logged as ``vram/accumulate_grad_batches`` when it changes. Checkpoints hold the position within the
    current accumulation, but not its gradients: after a resume the first optimizer step uses the remaining batches.

    Args:
        by_epoch: Micro-batches per optimizer step, by the epoch (from 0) at which the factor starts: ``{0: 8, 4: 4}``.
            1 before the first.
        by_step: Micro-batches per optimizer step, by the optimizer step (``trainer.global_step``) at which it starts.
        target_batch_size: Samples per optimizer step over all ranks (effective batch size). The factor follows from the
            dataloader's batch size. Give exactly one of these three.
        round: Rounding of the factor if ``target_batch_size`` does not divide. ``None`` raises an error.
        weight: Unit that the loss is averaged over: ``"samples"``; ``"tokens"``, labels other than -100;
            ``"shifted_tokens"``, tokens without the first of each sequence, for Hugging Face causal language models; or
            a function of the batch. The step is then the mean over all samples or tokens of all ranks. ``None``:
            micro-batches have equal weights. Costs one reduction of one number per optimizer step. A micro-batch with
            weight 0 has no backward, unless other ranks wait for it or its weight is on a device: then its loss must be
            finite.
        correct_batch_norm: Whether BatchNorm running statistics move once per optimizer step: momentum m becomes
            1 - (1 - m)^(1/k). Layers normalize each micro-batch separately in any case.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed, or not exactly one schedule is given.
        MisconfigurationException: In a fit, with manual optimization, DeepSpeed, FSDP1 with CPU offload, LBFGS, an
            ``optimizer_step`` that calls its closure several times, a second source of gradient accumulation, or a
            ``target_batch_size`` that does not divide.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import AccumulationScheduler
        >>> trainer = pl.Trainer(callbacks=[AccumulationScheduler({0: 8, 4: 4})], logger=False)
    """

    uses_gradients = True  # and changes them: see FSDPOffloadStrategy

    def __init__(
        self,
        by_epoch: dict[int, int] | None = None,
        by_step: dict[int, int] | None = None,
        target_batch_size: int | None = None,
        *,
        round: Rounding | None = None,
        weight: WeightName | Callable[[Any], Any] | None = None,
        correct_batch_norm: bool = True,
    ) -> None:
        given = {"by_epoch": by_epoch, "by_step": by_step, "target_batch_size": target_batch_size}
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(
                "AccumulationScheduler needs exactly one of by_epoch, by_step and target_batch_size, "
                f"got {' and '.join(names) or 'none'}."
            )
        check_target(target_batch_size, round)
        if weight is not None:
            make_batch_weight(weight, _WEIGHT)
        check_bool("AccumulationScheduler(correct_batch_norm)", correct_batch_norm)
        self.target_batch_size = target_batch_size
        self.round = round
        self.weight = weight
        self.correct_batch_norm = correct_batch_norm
        self._schedule: AccumulationSchedule | None = None
        if by_epoch is not None:
            self._schedule = read_schedule("AccumulationScheduler(by_epoch)", "epoch", by_epoch)
        elif by_step is not None:
            self._schedule = read_schedule("AccumulationScheduler(by_step)", "step", by_step)
        self._window = AccumulationWindow()
        self._resumed: dict[str, Any] | None = None
        self._run: AccumulationRun | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._window.batch is None and self._run is None:
            return {}
        return self._window.state_dict(is_interrupted=self._run is not None and self._run.is_interrupted)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._run is None:
            return  # a test of a checkpoint, say
        self._resumed = dict(state_dict)
        self._window.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, object]:
        # A copy is not part of any run.
        return {**vars(self), "_run": None, "_window": AccumulationWindow(), "_resumed": None}

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        check_run(trainer, self)
        self._window, self._resumed = AccumulationWindow(), None
        self._run = AccumulationRun(trainer, self._schedule, self._plan_factor)

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        check_module(trainer)  # once more: configure_model may have changed it
        assert self._run is not None
        weights = None
        if self.weight is not None:
            weights = AccumulationWeights(self._make_weight(trainer.lightning_module), trainer)
        self._run.start(self._window, weights)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._run is not None
        # Tuners may have trained before.
        self._window.load_state_dict(self._resumed or AccumulationWindow().state_dict(is_interrupted=False))
        schedule = self._run.begin_training()
        check_start(trainer, self.weight, schedule.largest)
        trainer.accumulate_grad_batches = schedule.factor(trainer.current_epoch, trainer.global_step)
        if schedule.largest > 1:
            self._run.correct_batch_norms(is_asked=self.correct_batch_norm)

    @override
    def _undo(self) -> None:
        if self._run is not None:
            if self._run.is_interrupted and not self._run.is_over:
                self._window.position -= 1  # for a checkpoint that another callback makes of the exception
            self._run.end()
        self._run = None

    def _plan_factor(self, trainer: pl.Trainer) -> int:
        # Tuners take the callbacks away. They try out batch sizes that need not divide the target.
        rounding = self.round if self in trainer.callbacks else "up"  # type: ignore[attr-defined]
        return plan_factor(trainer, self.target_batch_size or 1, rounding)

    def _make_weight(self, module: pl.LightningModule) -> BatchWeight:
        split = getattr(module, "split_batch", None)
        if self.weight == "samples" and split is not None:
            return lambda batch: check_weight(len(split(batch, 1)), "The number of samples of split_batch(batch, 1)")
        assert self.weight is not None
        return make_batch_weight(self.weight, _WEIGHT)
