"""What quantized weights cannot work with, each with the way out."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram.callbacks.hook_points import refuse_moved_parameters
from lightning_vram.private_names.fsdp2.states import shards_integers
from lightning_vram.private_names.lightning.strategies import saves_folders
from lightning_vram.techniques.sharding import has_meta

NAME = "QuantizeFrozenWeights"


def check_run(callback: Callback, trainer: pl.Trainer, *, has_frozen: bool) -> None:
    """Refuse what cannot work, before anything of the run happens.

    Args:
        callback: Of ours.
        trainer: In its ``setup`` hooks.
        has_frozen: Whether checkpoints have what is frozen.

    Raises:
        MisconfigurationException: With the reason and the way out.
    """
    refuse_moved_parameters(NAME, trainer, "quantized weights are decoded from")
    strategy = type(trainer.strategy)
    if hasattr(strategy, "device_mesh") and not shards_integers:  # ModelParallelStrategy, fsdp_offload
        raise MisconfigurationException(
            f"{NAME} with {strategy.__name__} needs torch >= 2.13, got {torch.__version__}, whose FSDP2 shards no "
            "integers: use 'ddp' or a single device."
        )
    whole_files = None if has_frozen else _how_to_save_whole(trainer.strategy)
    if whole_files is not None:
        raise MisconfigurationException(
            f"{NAME}(save='trainable') does not work with folders of shards, which load by the names that the module "
            f"has: use {whole_files}, whose files are small without what is frozen, or save='all'."
        )
    for other in trainer.callbacks:  # type: ignore[attr-defined]
        if type(other) is type(callback) and other is not callback:
            raise MisconfigurationException(f"Two {NAME} in one Trainer: leave one out.")
        if isinstance(other, BaseFinetuning):
            raise MisconfigurationException(
                f"{NAME} does not work with {type(other).__name__}, which unfreezes layers: a quantized weight cannot "
                "be trained. Leave one out."
            )
        if isinstance(other, WeightAveraging | StochasticWeightAveraging):
            raise MisconfigurationException(
                f"{NAME} does not work with {type(other).__name__}, which averages all parameters, bytes too. Leave "
                "one out."
            )


def check_memory(trainer: pl.Trainer) -> None:
    """Refuse meta layers of ``configure_model`` where Lightning empties all layers to give these memory.

    Raises:
        MisconfigurationException: If there are some.
    """
    if isinstance(trainer.strategy, ModelParallelStrategy) and has_meta(trainer.lightning_module):
        raise MisconfigurationException(
            f"{NAME} does not work with {type(trainer.strategy).__name__} where configure_model leaves layers on the "
            "meta device: Lightning would empty the quantized ones, too. Make them on the host, or in __init__, or use "
            "strategy='fsdp_offload'."
        )


def _how_to_save_whole(strategy: Strategy) -> str | None:
    """What to set if the strategy saves folders; ``None``: it does not."""
    if isinstance(strategy, ModelParallelStrategy):
        return f"{type(strategy).__name__}(save_distributed_checkpoint=False)" if saves_folders(strategy) else None
    arguments = getattr(strategy, "arguments", None)  # of fsdp_offload
    is_folder = getattr(arguments, "state_dict_type", "full") == "sharded"
    return f"{type(strategy).__name__}(state_dict_type='full')" if is_folder else None
