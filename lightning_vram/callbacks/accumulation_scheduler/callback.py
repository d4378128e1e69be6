"""Accumulate gradients over micro-batches so that every optimizer step is that of one big batch.

Lightning's own accumulation is exact for full windows of equal micro-batches with a factor that never changes. Here
every window is the mean over its micro-batches, also when the factor changes, at the end of an epoch, and where
micro-batches have different numbers of tokens. Windows that are weighted or not full cost one more pass over the
gradients.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice, check_positive_int
from lightning_vram.callbacks.accumulation_scheduler.run import AccumulationRun, AccumulationWeights, AccumulationWindow
from lightning_vram.callbacks.hook_points import FitTechnique, refuse_several
from lightning_vram.core.batches.micro_batches import BatchWeight, WeightName, check_weight, make_batch_weight
from lightning_vram.private_names.lightning import training_data
from lightning_vram.techniques.accumulation_schedule import AccumulationSchedule, read_schedule

_SCHEDULER = "AccumulationScheduler"


def check_run(trainer: pl.Trainer, callback: Callback) -> None:
    """Refuse other sources of accumulation before anything of the run happens."""
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"{_SCHEDULER} does not work with Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): both "
            "set the accumulation factor. Remove that argument."
        )
    if any(isinstance(other, GradientAccumulationScheduler) for other in trainer.callbacks):  # type: ignore[attr-defined]
        raise MisconfigurationException(
            f"{_SCHEDULER} does not work with GradientAccumulationScheduler: both set the accumulation factor. Remove "
            f"the latter; {_SCHEDULER}(by_epoch=...) takes its dict."
        )
    refuse_several(
        trainer, type(callback), f"{_SCHEDULER} can be used once, got several. Merge them into one schedule."
    )


def check_module(trainer: pl.Trainer) -> None:
    """Refuse a module, which is complete now, or a strategy."""
    module, strategy = trainer.lightning_module, trainer.strategy
    why = None
    if not module.automatic_optimization:
        why = (
            "manual optimization: training_step calls the optimizer itself. Accumulate there, or set "
            "automatic_optimization=True."
        )
    elif is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        why = (
            "training_step(dataloader_iter): the step fetches its batches itself. Use training_step(self, batch, "
            "batch_idx)."
        )
    elif strategy.handles_gradient_accumulation:
        why = (
            f"{type(strategy).__name__}: it accumulates gradients itself, with one factor for the whole run. Use its "
            "own configuration and remove the callback."
        )
    elif isinstance(strategy, FSDPStrategy) and strategy.cpu_offload.offload_params:
        why = "FSDPStrategy(cpu_offload=True): FSDP1 accumulates wrong gradients. Use FSDP2: ModelParallelStrategy."
    if why is not None:
        raise MisconfigurationException(f"{_SCHEDULER} does not work with {why}")


def check_start(trainer: pl.Trainer, weight: object, largest_factor: int) -> None:
    """Refuse LBFGS, and warn if ``MicroBatching`` weighs its parts differently, when optimizers are known."""
    if largest_factor > 1 and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            f"{_SCHEDULER} does not work with LBFGS: it evaluates the loss several times per step, each time with the "
            "last micro-batch only. Use larger batches or another optimizer."
        )
    if weight is None and largest_factor == 1:
        return
    for other in trainer.callbacks:  # type: ignore[attr-defined]
        # Without a weight batches count, as equal samples do.
        if type(other).__name__ == "MicroBatching" and other.weight != (weight or "samples"):
            rank_zero_warn(
                f"{_SCHEDULER}(weight={weight!r}) and MicroBatching(weight={other.weight!r}) weigh their micro-batches "
                "differently, so that an optimizer step is not the mean over its samples or tokens. Give both "
                "the same weight."
            )


Rounding = Literal["up", "down"]


def plan_factor(trainer: pl.Trainer, target_batch_size: int, rounding: Rounding | None) -> int:
    """Divide a target batch size by that of one micro-batch on all data-parallel ranks."""
    batch_size = _read_batch_size(trainer)
    # The data-parallel ranks: tensor-parallel ones share their batches. Missing on a single device.
    sampler_kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    num_ranks = int(sampler_kwargs.get("num_replicas") or 1)
    size = batch_size * num_ranks
    factor, remainder = divmod(target_batch_size, size)
    if remainder and rounding == "up":
        factor += 1
    reason = f"one micro-batch of all ranks is {batch_size} x {num_ranks} = {size} samples"
    if factor == 0:
        raise MisconfigurationException(
            f"AccumulationScheduler(target_batch_size) must be at least {size}, got {target_batch_size}: {reason}. "
            f"Choose a smaller batch size for the loader, or round='up'."
        )
    if remainder and rounding is None:
        nearest = " or ".join(str(value) for value in (factor * size, (factor + 1) * size))
        raise MisconfigurationException(
            f"AccumulationScheduler(target_batch_size) must be a multiple of {size}, got {target_batch_size}: "
            f"{reason}. Choose {nearest}, or round='down' or 'up'."
        )
    return factor


def _read_batch_size(trainer: pl.Trainer) -> int:
    combined = training_data(trainer.fit_loop)
    assert combined is not None  # the data is set up
    way_out = "Give by_epoch={0: number of micro-batches} instead."
    if len(combined.flattened) != 1:
        raise MisconfigurationException(
            f"AccumulationScheduler(target_batch_size) needs one training dataloader, got {len(combined.flattened)}. "
            f"{way_out}"
        )
    loader = combined.flattened[0]
    for place in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(place, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    raise MisconfigurationException(
        f"AccumulationScheduler(target_batch_size) needs a training dataloader with a batch_size, got a "
        f"{type(loader).__name__} without. {way_out}"
    )


_WEIGHT = "AccumulationScheduler(weight)"


class AccumulationScheduler(FitTechnique):
    """Accumulate gradients by epoch, by optimizer step or up to an effective batch size, with correct means.

    Each optimizer step uses the mean over the micro-batches (batches of the dataloader) that it accumulated. An epoch's
    last step may have fewer; a ``training_step`` that returned ``None`` does not count. The factor changes only right
    after an optimizer step. Gradients are final before any ``on_before_optimizer_step`` hook and before clipping. Under
    DDP they are synchronized once per optimizer step.

    ``trainer.estimated_stepping_batches`` is the true number of optimizer steps, from ``LightningModule.setup`` on.
    ``trainer.accumulate_grad_batches`` is the current factor, and is restored after the fit. Tuners accumulate, too.

    ``on_before_backward`` receives the loss times its weight, relative to the first. As always in Lightning, a
    scheduler with ``interval="step"`` and a ``frequency`` counts micro-batches.

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
            ``optimizer_step`` that calls its closure several times, a batch that is ``None``, a second source of
            gradient accumulation, or a ``target_batch_size`` that does not divide.

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
        if target_batch_size is not None:
            check_positive_int("AccumulationScheduler(target_batch_size)", target_batch_size)
        check_choice("AccumulationScheduler(round)", round, ("up", "down", None))
        if round is not None and target_batch_size is None:
            raise ValueError(f"AccumulationScheduler(round) needs target_batch_size, got round={round!r} alone.")
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
        self._run: AccumulationRun | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self._window.batch is None and self._run is None else self._window.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._run is not None:  # else it is a test of a checkpoint, say
            self._window.load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, object]:
        # A copy is not part of any run.
        return {**vars(self), "_run": None, "_window": AccumulationWindow()}

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        check_run(trainer, self)
        self._window = AccumulationWindow()
        plan = partial(plan_factor, target_batch_size=self.target_batch_size or 1, rounding=self.round)
        self._run = AccumulationRun(trainer, self._window, self._schedule, plan)

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        check_module(trainer)
        assert self._run is not None
        weights = None
        if self.weight is not None:
            weights = AccumulationWeights(self._make_weight(trainer.lightning_module), trainer)
        self._run.start(weights)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self._run is not None
        self._run.set_factor()
        self._run.logged_factor = None  # tuners take the loggers away
        largest = self._run.read_schedule().largest
        check_start(trainer, self.weight, largest)
        if largest > 1:
            self._run.correct_batch_norms(is_asked=self.correct_batch_norm)

    @override
    def _undo(self) -> None:
        if self._run is not None:
            self._run.end()
        self._run = None

    def _make_weight(self, module: pl.LightningModule) -> BatchWeight:
        split = getattr(module, "split_batch", None)
        if self.weight == "samples" and split is not None:
            return lambda batch: check_weight(len(split(batch, 1)), "The number of samples of split_batch(batch, 1)")
        assert self.weight is not None
        return make_batch_weight(self.weight, _WEIGHT)
