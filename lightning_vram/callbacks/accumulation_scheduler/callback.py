"""Accumulate gradients over micro-batches so that every optimizer step is that of one big batch.

A big batch in k micro-batches needs the activations of one of them. Lightning's own accumulation is exact for full
windows of equal micro-batches with a factor that never changes. Here every window is the mean over what it holds, also
when the factor changes, at the end of an epoch, and where micro-batches have different numbers of tokens.

It costs k forward and backward passes per step, as any accumulation does; windows that are weighted or not full one
more pass over the gradients. It does not help where one micro-batch of one sample does not fit, and it cannot make
layers that look at other samples of the batch (batch norm, contrastive losses) see more than a micro-batch.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_vram.argument_checks import check_bool
from lightning_vram.callbacks.accumulation_scheduler.check import (
    check_module,
    check_optimizers,
    check_run,
    warn_of_own_steps,
    warn_of_weights,
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
    """Accumulate by epoch, by optimizer step or up to a batch size; every window is the mean over what it holds.

    A factor changes right after an optimizer step and at no other time. An epoch's last window, which may be shorter,
    is the mean over the micro-batches that are there; one whose ``training_step`` returned ``None`` does not count.
    Gradients of the optimizer's parameters are right before any ``on_before_optimizer_step`` hook and before clipping.
    Under DDP they are synchronised once per window. ``trainer.estimated_stepping_batches`` is the number of steps there
    will be, from ``LightningModule.setup`` on; ``trainer.accumulate_grad_batches`` the length of the window under way,
    before the first one its factor (with ``target_batch_size`` once the training data is set up), and what it was
    after the fit. Tuners accumulate, too.

    A batch that is ``None`` takes a place in its window, so that ranks stay in step; where it would be the last, the
    window ends with the next batch. ``on_before_backward`` gets the loss times its weight (in units of the first one).
    As always in Lightning, a learning rate scheduler with ``interval="step"`` and a ``frequency`` counts micro-batches.

    The factor is logged as ``vram/accumulate_grad_batches`` when it changes. A checkpoint holds the place in the window
    under way, not its gradients: after a resume the window ends where it would have, with what it still gets.

    Args:
        by_epoch: From which epoch on (counted from 0) how many micro-batches make a step, in ascending order:
            ``{0: 8, 4: 4}``. 1 before the first.
        by_step: The same by optimizer steps (``trainer.global_step``).
        target_batch_size: Samples per optimizer step, of all ranks; the factor follows from the dataloader's batch
            size. Exactly one of these three is given.
        round: With ``target_batch_size``, what to do with a remainder. ``None`` refuses it.
        weight: What a micro-batch counts: ``"samples"``; ``"tokens"``, labels that are not -100;
            ``"shifted_tokens"``, the same without the first of each sequence, for losses that shift labels by one (as
            causal language models of transformers do); or a function of the batch. That is what the loss divides
            by: the window, over all ranks, then is the mean over all samples or tokens. ``None``: micro-batches count
            the same. Costs one reduction of one number per optimizer step. The backward of a micro-batch that is known
            to count 0 without asking a device is left out, unless other ranks wait for it (the last of a window under
            DDP, all under FSDP2): there, and for weights on a device, its loss must be finite.
        correct_batch_norm: Whether running statistics of batch norms move once per window: momentum m becomes
            1 - (1 - m)^(1/k). Layers normalise by micro-batches in any case.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument has a value that is not allowed, or not exactly one schedule is given.
        MisconfigurationException: In a fit, if the run cannot accumulate so: manual optimization, DeepSpeed, FSDP1
            with offload, LBFGS, an ``optimizer_step`` that calls its closure several times, another accumulation
            beside, a ``target_batch_size`` that does not divide.

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
        check_optimizers(trainer, schedule.largest)
        warn_of_own_steps(trainer, schedule.largest)
        warn_of_weights(trainer, self.weight, schedule.largest)
        trainer.accumulate_grad_batches = schedule.factor(trainer.current_epoch, trainer.global_step)
        if schedule.largest > 1:
            if self.correct_batch_norm:
                self._run.correct_batch_norms()
            self._run.warn_of_batch_norms()

    @override
    def _undo(self) -> None:
        if self._run is not None:
            if self._run.is_interrupted and not self._run.is_over:
                self._window.rewind()  # for a checkpoint that another callback makes of the exception
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
