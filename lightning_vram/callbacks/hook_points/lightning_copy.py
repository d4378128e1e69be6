"""Tell the two copies of Lightning apart: ``lightning.pytorch`` and ``pytorch_lightning`` share no class."""

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException


def check_trainer(name: str, trainer: object) -> None:
    """Refuse a Trainer of the other copy: what depends on its classes would silently not apply.

    Args:
        name: Class of the callback.
        trainer: What the callback was given.

    Raises:
        MisconfigurationException: If ``trainer`` is no ``lightning.pytorch.Trainer``.
    """
    if not isinstance(trainer, pl.Trainer):
        package = type(trainer).__module__.partition(".")[0]
        raise MisconfigurationException(
            f"{name} works with lightning.pytorch, got a Trainer of {package}. "
            "Replace 'import pytorch_lightning as pl' by 'import lightning.pytorch as pl'."
        )
