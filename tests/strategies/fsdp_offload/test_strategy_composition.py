"""``fsdp_offload`` with everything else in the package: the same bits as without it."""

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload
from support.offload_nets import GAN, Fused, FusedCNN, Split
from support.parts import CALLBACKS as ALL_CALLBACKS
from support.parts import CHANGES_TRAINING, NEEDS_HEAD, from_config

from lightning_vram import LeanMixedPrecision, MicroBatching
from lightning_vram.private_names.fsdp2 import shards_integers
from lightning_vram.techniques.sharding import can_recover

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what a callback warns about is tested in its own file
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # LightningCLI 2.6 on jsonargparse 4.53; fork
]


REFUSED = {"OptimizerInBackward", "QuantizationAwareTraining"}  # tests of their own say so
REFUSED |= set() if can_recover() else {"MicroBatching"}  # "auto" needs torch 2.13
REFUSED |= set() if shards_integers else {"QuantizeFrozenWeights"}
READS_WEIGHTS = {"TokenTiling", "ChunkedLoss"}  # of tiled modules and of the head, in float32
CALLBACKS = [name for name in ALL_CALLBACKS if name not in REFUSED]


@pytest.mark.slow_except("Fused-ActivationCheckpointing", "Fused-MicroBatching", "FusedCNN-InPlaceFusion")
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("make", [Fused, FusedCNN])
def test_callbacks(name, make, same_in_modes):
    if name in NEEDS_HEAD and make is FusedCNN:
        pytest.skip("no head")
    options = {} if name in CHANGES_TRAINING else {"accumulate_grad_batches": 2}
    same_in_modes(make, ("params", "none"), parts=lambda: {"callbacks": [from_config(name)]}, **options)


class NarrowWeights(pl.Callback):
    """Notes which weights are transferred in 16 bits."""

    def on_train_end(self, trainer, module):
        flat_shards = [flat_shard for group in trainer.strategy._sharding.groups for flat_shard in group.flat_shards]
        narrow = [flat_shard for flat_shard in flat_shards if flat_shard.transfer_dtype == torch.bfloat16]
        self.names = {parameter.name for flat_shard in narrow for parameter in flat_shard.parameters}


@pytest.mark.slow_except("ActivationCheckpointing")
@pytest.mark.parametrize("name", [name for name in CALLBACKS if name not in READS_WEIGHTS])
def test_callbacks_leave_transfers_in_16_bits(name, fit):
    found = []
    for callbacks in ([], [from_config(name)]):
        narrow = NarrowWeights()
        fit(Fused, narrow, *callbacks, strategy=ForkingOffload(), precision="bf16-mixed")
        found.append(narrow.names)
    assert found[0]
    assert found[1] == found[0]


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("size", [2, "auto"] if can_recover() else [2])
@pytest.mark.parametrize("make", [Fused, FusedCNN])
def test_micro_batches(size, make, same_in_modes):
    # after the sanity check what the root has is still gathered, and has a hook of ours
    options = {"gradient_clip_val": 0.1, "num_sanity_val_steps": 2, "limit_val_batches": 1}
    same_in_modes(make, parts=lambda: {"callbacks": [MicroBatching(size)]}, **options)


@pytest.mark.slow
def test_all_together(same_in_modes):
    names = [name for name in CALLBACKS if name not in CHANGES_TRAINING]
    same_in_modes(Fused, parts=lambda: {"callbacks": [from_config(name) for name in names]})


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ({"precision": "bf16", "fp32_modules": "net.head"}, {}),
        ({"precision": "bf16", "low_precision_norms": True}, {}),
        ({"precision": "bf16", "recast_in_backward": True}, {}),
        ({"precision": "fp16"}, {"gradient_clip_val": 0.1, "max_epochs": 2}),
    ],
    ids=["fp32_modules", "low_precision_norms", "recast_in_backward", "fp16"],
)
def test_precision_plugin(arguments, options, same_in_modes):
    same_in_modes(Fused, ("params", "none"), parts=lambda: {"plugins": [LeanMixedPrecision(**arguments)]}, **options)


def test_manual_optimization_with_the_precision_plugin(same_as_baseline):
    # a layer that is called twice adds its two gradients in 16 bit, unless weights come in 32
    plain = {"plugins": [LeanMixedPrecision("bf16")]}
    strategy = ForkingOffload(narrow_transfers=False)
    same_as_baseline(GAN, baseline=plain, strategy=strategy, plugins=[LeanMixedPrecision("bf16")])


@pytest.mark.slow_except("MicroBatching", "ActivationOffload")
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_on_two_ranks(name, same_as_baseline):
    options = {"devices": 2, "use_distributed_sampler": False}
    baseline = {"strategy": "ddp_fork", "callbacks": [from_config(name)]}
    same_as_baseline(Split, from_config(name), tolerance=1e-6, baseline=baseline, strategy=ForkingOffload(), **options)
