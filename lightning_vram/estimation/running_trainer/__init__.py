"""What a Trainer that is about to run tells: its arguments, its first batch, and what its device has left."""

from lightning_vram.estimation.running_trainer.arguments import read_trainer_arguments
from lightning_vram.estimation.running_trainer.decision import (
    RunningTrainer,
    bytes_of_others,
    decide_together,
    describe_device,
    forget_shared,
)
from lightning_vram.estimation.running_trainer.limit import AUTO, check_limit, limit_bytes

__all__ = [
    "AUTO",
    "RunningTrainer",
    "bytes_of_others",
    "check_limit",
    "decide_together",
    "describe_device",
    "forget_shared",
    "limit_bytes",
    "read_trainer_arguments",
]
