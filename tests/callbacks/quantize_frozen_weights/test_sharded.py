"""``QuantizeFrozenWeights`` where weights are sharded: FSDP2 and ``fsdp_offload``, on two ranks and on one."""

import os
import re
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.checkpoint_nets import run_ranks, whole
from support.helpers import Forking, ForkingOffload, assert_equal_weights
from support.lora_nets import NUM_QUANTIZED, LitLoRA
from support.offload_nets import leave_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_vram import ActivationCheckpointing, QuantizeFrozenWeights
from lightning_vram.techniques.quantize_frozen_weights import quantize_frozen_weights

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]
FORMS = ["full", "sharded"]


@pytest.fixture(autouse=True)
def _alone():
    yield
    leave_group()


class Sharded(LitLoRA):
    """For FSDP2; notes its whole weights."""

    policy = MixedPrecisionPolicy()

    def configure_model(self) -> None:
        mesh = getattr(self, "device_mesh", None)
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net, FSDPModule):
            for part in (self.net.embed, self.net.up, self.net.down, self.net):
                fully_shard(part, mesh=mesh["data_parallel"], mp_policy=self.policy)

    def on_train_start(self) -> None:
        self.local_bytes = sum(
            p.to_local().untyped_storage().nbytes() for p in self.parameters() if p.dtype is torch.uint8
        )

    def on_train_end(self) -> None:
        if self.trainer.world_size > 1:
            self.seen = {name: whole(value).clone() for name, value in self.state_dict().items()}


class Inside(ModelParallelStrategy):
    """In a process that is one of two ranks."""

    def __init__(self, form: str) -> None:
        super().__init__(2, 1, save_distributed_checkpoint=form == "sharded")

    def _configure_launcher(self) -> None:
        self._launcher = None


class Offload(ForkingOffload):
    def __init__(self, form: str) -> None:
        super().__init__(state_dict_type=form)

    def make_launcher(self) -> None:
        return None


class Saving(pl.Callback):
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def rounded(bits: int = 4) -> LitLoRA:
    model = LitLoRA()
    quantize_frozen_weights(model, bits).remove()
    return model


def fit(make_trainer: Any, make: Any, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Any:
    pl.seed_everything(0, verbose=False)
    model = make()
    options = {"limit_val_batches": 0, "use_distributed_sampler": False, **options}
    make_trainer(callbacks=list(callbacks), **options).fit(model, ckpt_path=ckpt_path)
    return model


def on_each_rank(folder: Any, make_trainer: Any, strategy: Any, expected: Any) -> None:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    run = partial(fit, make_trainer, Sharded, devices=2)
    model = run(QuantizeFrozenWeights(4), ActivationCheckpointing(["net.up", "net.down"]), strategy=strategy("full"))
    assert model.local_bytes == 0.5625 * NUM_QUANTIZED / 2
    packed = {name for name, value in model.seen.items() if value.dtype is torch.uint8}
    assert len(packed) == 5
    for name, value in expected.items():
        assert name in packed or (model.seen[name] - value).abs().max() <= 1e-6, name
    for form in FORMS:
        for save in ("all", "trainable")[: 2 if form == "full" else 1]:
            path = folder / f"{form}-{save}.ckpt"
            quantize = partial(QuantizeFrozenWeights, 4, save=save)
            run(quantize(), Saving(path), strategy=strategy(form))
            dist.barrier()
            resumed = run(quantize(), strategy=strategy(form), ckpt_path=path)
            assert all(torch.equal(resumed.seen[name], value) for name, value in model.seen.items()), (form, save)


@pytest.mark.parametrize("strategy", [Inside, Offload])
def test_two_ranks_are_one_and_resumed_runs_end_at_the_same_bits(strategy, make_trainer, tmp_path):
    expected = fit(make_trainer, rounded).state_dict()
    run_ranks(2, on_each_rank, tmp_path, make_trainer, strategy, expected)
