"""Strategies that move parameters in ways no saved tensor survives."""

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def refuse_moved_parameters(name: str, trainer: pl.Trainer, use: str) -> None:
    """Refuse FSDP1 and DeepSpeed, which free and refill memory that saved tensors are views of.

    Args:
        name: Of the callback.
        trainer: That is set up.
        use: What the callback does with such parameters, as in "parameters that {use}".

    Raises:
        MisconfigurationException: If the trainer has one of them.
    """
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        raise MisconfigurationException(
            f"{name} does not work with {type(trainer.strategy).__name__}: it frees and moves parameters that {use}. "
            "Use ModelParallelStrategy (FSDP2), 'ddp' or a single device."
        )
