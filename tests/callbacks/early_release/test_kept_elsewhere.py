"""Gradients that freeing does not free: told, and left alone."""

import weakref
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.helpers import ForkingOffload
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.callbacks.early_release.callback import why_buckets_stay, why_not_first

WHY_BUCKETS = "with gradient_as_bucket_view=True DDP's buckets hold them for the whole run."


@pytest.mark.distributed
@pytest.mark.parametrize("is_view", [False, True])
def test_only_gradients_that_are_views_of_buckets_stay(is_view, one_rank):
    layer = nn.Linear(4, 4)
    model = DistributedDataParallel(layer, gradient_as_bucket_view=is_view)
    model(torch.ones(2, 4)).sum().backward()
    storage = weakref.ref(layer.weight.grad.untyped_storage())
    layer.zero_grad()
    assert (storage() is not None) is is_view
    trainer = SimpleNamespace(strategy=SimpleNamespace(model=model))
    assert why_buckets_stay(trainer) == (WHY_BUCKETS if is_view else None)


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
