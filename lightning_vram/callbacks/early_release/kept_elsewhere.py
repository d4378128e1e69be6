"""Gradients that freeing ``.grad`` does not free, or that hooks still need."""

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parallel import DistributedDataParallel


def why_left_alone(trainer: pl.Trainer) -> str | None:
    """Return why zeroing stays where it is; ``None`` if it may come first."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    if strategy.handles_gradient_accumulation:
        return f"{name} manages and zeroes them itself."
    offload = getattr(getattr(strategy, "arguments", None), "offload", "none")  # of fsdp_offload
    if offload != "none":  # zeroing would wait for steps that run alongside the forward
        return f"{name}(offload={offload!r}) stores them on the host."
    hook = _own_hook(trainer)
    if hook is not None:
        return f"{hook} would run before training_step, which may read what it changes. Use on_train_batch_end instead."
    return None


def _own_hook(trainer: pl.Trainer) -> str | None:
    """Name the first hook of zeroing in the user's code."""
    module, name = trainer.lightning_module, "on_before_zero_grad"
    owners = [(type(module).__name__, hook) for hook in (name, "optimizer_zero_grad") if is_overridden(hook, module)]
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners += [(type(one).__name__, name) for one in callbacks if is_overridden(name, one, pl.Callback)]
    return ".".join(owners[0]) if owners else None


def why_buckets_stay(trainer: pl.Trainer) -> str | None:
    """Return why DDP holds the memory of gradients, once the module is wrapped; ``None`` if it does not."""
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view:
        return "with gradient_as_bucket_view=True DDP's buckets hold them for the whole run."
    return None
