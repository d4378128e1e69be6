"""How long ranks wait for each other."""

from datetime import timedelta

import lightning.pytorch as pl
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout

from lightning_vram.private_names.lightning.strategies import read_timeout


def rank_timeout(trainer: pl.Trainer) -> timedelta:
    """Return the ``timeout`` of the strategy, else that of ``torch.distributed``: 30 minutes."""
    arguments = getattr(trainer.strategy, "arguments", None)  # of fsdp_offload
    return getattr(arguments, "timeout", read_timeout(trainer.strategy)) or default_pg_timeout
