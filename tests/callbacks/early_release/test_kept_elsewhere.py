"""Gradients that freeing does not free: told, and left alone."""

from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.helpers import ForkingOffload

from lightning_vram.callbacks.early_release.callback import why_not_first


class KeepsItself(SingleDeviceStrategy):
    handles_gradient_accumulation = True  # as DeepSpeed has it


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (SingleDeviceStrategy, None),
        (KeepsItself, "KeepsItself manages and zeroes them itself."),
        (lambda: ForkingOffload(offload="none"), None),
        (ForkingOffload, "ForkingOffload(offload='params') stores them on the host."),
        (
            lambda: ForkingOffload(offload="optimizer"),
            "ForkingOffload(offload='optimizer') stores them on the host.",
        ),
    ],
)
def test_who_has_them_elsewhere(strategy, why):
    trainer = SimpleNamespace(strategy=strategy(), lightning_module=pl.LightningModule(), callbacks=[])
    assert why_not_first(trainer) == why
