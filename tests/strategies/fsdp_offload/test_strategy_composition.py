"""``fsdp_offload`` with everything else in the package: the same bits as without it."""

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload, assert_equal_weights, describe_module
from support.offload_nets import GAN, MODES, Fused, FusedCNN, Split, leave_group
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


@pytest.fixture(autouse=True)
def _alone():
    yield
    leave_group()


@pytest.fixture
def check(make_trainer):
    def check(make, make_arguments=dict, modes=("params",), **arguments):
        """Train with parts plain and sharded; each run has its own parts."""
        fitted = []
        for mode in (None, *modes):
            parts = make_arguments()
            pl.seed_everything(0, verbose=False)
            model = make()
            before = describe_module(model)
            strategy = "auto" if mode is None else ForkingOffload(**MODES[mode])
            make_trainer(strategy=strategy, **{"max_epochs": 1, **arguments}, **parts).fit(model)
            assert describe_module(model) == before
            fitted.append(model)
        for ours in fitted[1:]:
            assert_equal_weights(ours, fitted[0])

    return check


@pytest.mark.slow_except(
    "Fused-ActivationCheckpointing",
    "Fused-ActivationOffload",
    "Fused-MicroBatching",
    "FusedCNN-InPlaceFusion",
    "FusedCNN-AccumulationScheduler",
)
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("make", [Fused, FusedCNN])
def test_callbacks(name, make, check):
    if name in NEEDS_HEAD and make is FusedCNN:
        pytest.skip("no head")
    check(make, lambda: {"callbacks": [from_config(name)]}, modes=("params", "none"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_with_accumulation_clipping_and_autocast(name, check):
    arguments = {} if name in CHANGES_TRAINING else {"accumulate_grad_batches": 2}
    parts = lambda: {"callbacks": [from_config(name)]}  # noqa: E731
    if name not in NEEDS_HEAD:
        check(FusedCNN, parts, modes=("optimizer",), precision="bf16-mixed", **arguments)
    check(Fused, parts, gradient_clip_val=0.1, **arguments)


class NarrowWeights(pl.Callback):
    """Notes which weights are transferred in 16 bits."""

    def on_train_end(self, trainer, module):
        flat_shards = [flat_shard for group in trainer.strategy._sharding.groups for flat_shard in group.flat_shards]
        self.names = {
            p.name
            for flat_shard in flat_shards
            if flat_shard.transfer_dtype == torch.bfloat16
            for p in flat_shard.parameters
        }


@pytest.mark.slow_except("ActivationCheckpointing")
@pytest.mark.parametrize("name", [name for name in CALLBACKS if name not in READS_WEIGHTS])
def test_callbacks_leave_transfers_in_16_bits(name, make_trainer):
    found = []
    for callbacks in ([], [from_config(name)]):
        pl.seed_everything(0, verbose=False)
        narrow = NarrowWeights()
        strategy, callbacks = ForkingOffload(min_params=100), [narrow, *callbacks]
        make_trainer(strategy=strategy, callbacks=callbacks, precision="bf16-mixed", max_epochs=1).fit(Fused())
        found.append(narrow.names)
    assert found[0]
    assert found[1] == found[0]


def test_checkpointed_layers_whose_weights_are_transferred_in_16_bits(check):
    parts = lambda: {"callbacks": [from_config("ActivationCheckpointing")]}  # noqa: E731
    check(Fused, parts, modes=("params", "optimizer"), precision="bf16-mixed", max_epochs=2)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("size", [2, "auto"] if can_recover() else [2])
@pytest.mark.parametrize("make", [Fused, FusedCNN])
def test_micro_batches(size, make, check):
    # after the sanity check what the root has is still gathered, and has a hook of ours
    check(make, lambda: {"callbacks": [MicroBatching(size)]}, gradient_clip_val=0.1, num_sanity_val_steps=2)


@pytest.mark.slow
def test_all_together(check):
    names = [name for name in CALLBACKS if name not in CHANGES_TRAINING]
    check(Fused, lambda: {"callbacks": [from_config(name) for name in names]})


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"fp32_modules": "head"}, {"low_precision_norms": True}, {"recast_in_backward": True}],
    ids=["no options", "fp32_modules", "low_precision_norms", "recast_in_backward"],
)
def test_precision_plugin(options, check):
    plugins = lambda: {"plugins": [LeanMixedPrecision("bf16", **{**options})]}  # noqa: E731
    if options.get("fp32_modules"):
        plugins = lambda: {"plugins": [LeanMixedPrecision("bf16", fp32_modules="net.head")]}  # noqa: E731
    check(Fused, plugins, modes=("params", "optimizer", "none"))


def test_scaled_gradients(check):
    check(Fused, lambda: {"plugins": [LeanMixedPrecision("fp16")]}, gradient_clip_val=0.1, max_epochs=2)


def test_manual_optimization_with_the_precision_plugin(make_trainer):
    # a layer that is called twice adds its two gradients in 16 bit, unless weights come in 32
    fitted = []
    for strategy in ("auto", ForkingOffload(narrow_transfers=False)):
        pl.seed_everything(0, verbose=False)
        model = GAN()
        make_trainer(strategy=strategy, plugins=[LeanMixedPrecision("bf16")], max_epochs=1).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)


@pytest.mark.slow_except("ActivationCheckpointing", "MicroBatching")
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_on_two_ranks(name, make_trainer):
    fitted = []
    for strategy, devices in (("ddp_fork", 2), (ForkingOffload(), 2)):
        callback = from_config(name)
        pl.seed_everything(0, verbose=False)
        model = Split()
        make_trainer(
            strategy=strategy,
            devices=devices,
            callbacks=[callback],
            max_epochs=1,
            limit_val_batches=0,
            use_distributed_sampler=False,
        ).fit(model)
        fitted.append(model)
    plain, ours = fitted
    for key, parameter in ours.named_parameters():
        assert (parameter - plain.get_parameter(key)).abs().max() <= 1e-6, key
