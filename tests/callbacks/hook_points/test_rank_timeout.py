"""How long callbacks wait for other ranks: as long as the strategy was told."""

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_vram.callbacks.hook_points import rank_timeout
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (DDPStrategy(timeout=timedelta(seconds=12)), timedelta(seconds=12)),
        (FSDPOffloadStrategy(timeout=12), timedelta(seconds=12)),
        (DDPStrategy(), timedelta(minutes=30)),
        (DDPStrategy(timeout=None), timedelta(minutes=30)),
        ("auto", timedelta(minutes=30)),
    ],
    ids=["ddp", "fsdp_offload", "ddp by default", "ddp with none", "one device"],
)
def test_it_is_that_of_the_strategy(make_trainer, strategy: Any, expected: timedelta) -> None:
    trainer: pl.Trainer = make_trainer(strategy=strategy, devices=1)
    assert rank_timeout(trainer) == expected
