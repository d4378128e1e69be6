"""What gradient accumulation cannot work with."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import LBFGS

_NAME = "AccumulationScheduler"


def check_run(trainer: pl.Trainer, callback: Callback) -> None:
    """Refuse a run before anything of it happens."""
    check_module(trainer)
    if trainer.accumulate_grad_batches != 1:
        raise MisconfigurationException(
            f"{_NAME} does not work with Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): both "
            "set the accumulation factor. Remove that argument."
        )
    others: list[Callback] = [other for other in trainer.callbacks if other is not callback]  # type: ignore[attr-defined]
    if any(isinstance(other, GradientAccumulationScheduler) for other in others):
        raise MisconfigurationException(
            f"{_NAME} does not work with GradientAccumulationScheduler: both set the accumulation factor. Remove "
            f"the latter; {_NAME}(by_epoch=...) takes its dict."
        )
    if any(isinstance(other, type(callback)) for other in others):
        raise MisconfigurationException(f"{_NAME} can be used once, got several. Merge them into one schedule.")


def check_module(trainer: pl.Trainer) -> None:
    """Refuse a module or a strategy."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{_NAME} does not work with manual optimization: training_step calls the optimizer itself. "
            "Accumulate there, or set automatic_optimization=True."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"{_NAME} does not work with training_step(dataloader_iter): the step fetches its batches itself. Use "
            "training_step(self, batch, batch_idx)."
        )
    if strategy.handles_gradient_accumulation:
        raise MisconfigurationException(
            f"{_NAME} does not work with {type(strategy).__name__}: it accumulates gradients itself, with one "
            "factor for the whole run. Use its own configuration and remove the callback."
        )
    if isinstance(strategy, FSDPStrategy) and strategy.cpu_offload.offload_params:
        raise MisconfigurationException(
            f"{_NAME} does not work with FSDPStrategy(cpu_offload=True): FSDP1 accumulates wrong gradients there. "
            "Use ModelParallelStrategy (FSDP2)."
        )


def check_start(trainer: pl.Trainer, weight: object, largest_factor: int) -> None:
    """Refuse LBFGS, and warn of own steps and other weights, when optimizers and data are known."""
    if largest_factor > 1 and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        raise MisconfigurationException(
            f"{_NAME} does not work with LBFGS: it evaluates the loss several times per step, each time with the "
            "last micro-batch only. Use larger batches or another optimizer."
        )
    module = trainer.lightning_module
    hooks = [name for name in ("optimizer_step", "optimizer_zero_grad") if is_overridden(name, module)]
    if hooks and largest_factor > 1:
        names = " and ".join(f"{type(module).__name__}.{hook}" for hook in hooks)
        rank_zero_warn(
            f"{_NAME} accumulates gradients, so {names} is called once per optimizer step, not for every batch. "
            "Move code that must run for every batch to on_train_batch_end."
        )
    if weight is not None or largest_factor > 1:
        _warn_of_weights(trainer, weight)


def _warn_of_weights(trainer: pl.Trainer, weight: object) -> None:
    """Warn if ``MicroBatching`` weighs its parts differently. Without a weight, batches count, as equal samples do."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for other in callbacks:
        if all(base.__name__ != "MicroBatching" for base in type(other).__mro__):
            continue
        other_weight = getattr(other, "weight", "samples")
        if other_weight != (weight or "samples"):
            rank_zero_warn(
                f"{_NAME}(weight={weight!r}) and MicroBatching(weight={other_weight!r}) weigh their micro-batches "
                "differently, so that an optimizer step is not the mean over its samples or tokens. Give both "
                "the same weight."
            )
