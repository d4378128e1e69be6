"""How many micro-batches of all ranks make a target batch."""

from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.private_names.lightning.loops import training_data

Rounding = Literal["up", "down"]


def check_target(target_batch_size: int | None, rounding: Rounding | None) -> None:
    """Check the arguments ``target_batch_size`` and ``round``."""
    if target_batch_size is not None:
        check_positive_int("AccumulationScheduler(target_batch_size)", target_batch_size)
    if rounding not in (None, "up", "down"):
        raise ValueError(f"AccumulationScheduler(round) must be 'up', 'down' or None, got {rounding!r}.")
    if rounding is not None and target_batch_size is None:
        raise ValueError(f"AccumulationScheduler(round) needs target_batch_size, got round={rounding!r} alone.")


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
