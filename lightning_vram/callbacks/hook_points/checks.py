"""What several callbacks refuse."""

import lightning.pytorch as pl
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_trainer(name: str, trainer: object) -> None:
    """Refuse a Trainer of ``pytorch_lightning``, whose classes differ: checks by class would not apply."""
    if not isinstance(trainer, pl.Trainer):
        package = type(trainer).__module__.partition(".")[0]
        raise MisconfigurationException(
            f"{name} works with lightning.pytorch, got a Trainer of {package}. "
            "Replace 'import pytorch_lightning as pl' by 'import lightning.pytorch as pl'."
        )


def refuse_moved_parameters(name: str, trainer: pl.Trainer, use: str) -> None:
    """Refuse FSDP1 and DeepSpeed, which free and move parameters. ``use``: what the callback does with them."""
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        raise MisconfigurationException(
            f"{name} does not work with {type(trainer.strategy).__name__}: it frees and moves parameters that {use}. "
            "Use ModelParallelStrategy (FSDP2), 'ddp' or a single device."
        )
