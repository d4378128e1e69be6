"""What micro-batches cannot work with, and where ranks must stay in step."""

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.callbacks.hook_points import refuse_moved_parameters
from lightning_vram.core.gradients.reduction import why_reducer_is_needed
from lightning_vram.core.tensors.shards import is_sharded
from lightning_vram.private_names.torch.tensors import has_accumulation_hooks
from lightning_vram.techniques.sharding import can_recover


def check_micro_batching(trainer: pl.Trainer, *, is_training: bool) -> None:
    """Refuse what cannot work, in the ``setup`` hooks, before anything has changed."""
    refuse_moved_parameters("MicroBatching", trainer, "a second forward in one step would find elsewhere")
    module = trainer.lightning_module
    steps = ["training_step"] if is_training else ["validation_step", "test_step", "predict_step"]
    for step in steps:
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                f"MicroBatching does not work with {step}(self, dataloader_iter): the step fetches its batches "
                f"itself. Use {step}(self, batch, batch_idx)."
            )
    if is_training and not module.automatic_optimization:
        raise MisconfigurationException(
            "MicroBatching does not work with manual optimization: it cannot split the forward, backward and "
            "optimizer step inside training_step. Set automatic_optimization=True, or split the batch in "
            "training_step."
        )


def check_recovery(trainer: pl.Trainer) -> None:
    """Refuse to run batches again where a run cannot recover from an error."""
    if is_sharded(trainer.lightning_module) and not can_recover():
        raise MisconfigurationException(
            "MicroBatching('auto') needs PyTorch 2.13 or newer under FSDP2: older versions cannot recover from a "
            "failed forward or backward. Give a fixed size, such as MicroBatching(8)."
        )


def check_gradients(trainer: pl.Trainer, *, retries: bool) -> None:
    """Refuse other ways to reduce and use gradients, which show only once the strategy has wrapped the module."""
    stepping = [name for name, p in trainer.lightning_module.named_parameters() if has_accumulation_hooks(p)]
    for optimizer in trainer.optimizers:  # has the shards of what is gathered
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        stepping += [type(optimizer).__name__ for p in parameters if has_accumulation_hooks(p)]
    if stepping:
        raise MisconfigurationException(
            "MicroBatching does not work with post-accumulate-grad hooks, which optimizers in the backward use: "
            f"they would run once per micro-batch. Remove the hook of {stepping[0]}."
        )
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return
    if model.static_graph:
        raise MisconfigurationException(
            "MicroBatching does not work with DDPStrategy(static_graph=True): its first backward must be "
            "synchronized, and that of a first micro-batch is not. Remove static_graph."
        )
    reason = why_reducer_is_needed(model) if retries else None
    if reason is not None:
        raise MisconfigurationException(
            f"MicroBatching('auto') does not work with {reason}: a rank that runs out of memory during a "
            "reduction would block the others, so gradients are averaged after the backward, without the "
            "reducer. Give a fixed size, such as MicroBatching(8)."
        )


def reduces_by_hand(trainer: pl.Trainer, *, retries: bool, weighs: bool) -> bool:
    """Whether gradients are averaged after the backward, under DDP."""
    # A rank that runs out of memory in the middle of a reduction leaves the others waiting in it. A parameter that only
    # an earlier micro-batch used is unused for the reducer. And the last micro-batch, after which it reduces, may have
    # weight 0.
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return False
    return retries or ((model.find_unused_parameters or weighs) and why_reducer_is_needed(model) is None)
