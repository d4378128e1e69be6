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
from support.helpers import ForkingOffload, assert_equal_weights
from support.lora_nets import NUM_QUANTIZED, LitLoRA
from support.offload_nets import leave_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_vram import ActivationCheckpointing, QuantizeFrozenWeights
from lightning_vram.callbacks.quantize_frozen_weights import callback
from lightning_vram.private_names.fsdp2 import shards_integers
from lightning_vram.techniques.quantize_frozen_weights import quantize_frozen_weights

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.skipif(not shards_integers, reason="FSDP2 shards integers as of torch 2.13"),
]


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
            v.to_local().untyped_storage().nbytes() for v in self.state_dict().values() if v.dtype is torch.uint8
        )

    def on_train_end(self) -> None:
        if self.trainer.world_size > 1:
            self.read = {name: whole(p).clone() for name, p in self.named_parameters()}
            self.shapes = {name: (p.shape, p.to_local().shape) for name, p in self.named_parameters()}
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

    def _configure_launcher(self) -> None:
        self._launcher = None


class Saving(pl.Callback):
    def __init__(self, path: Any) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


class Cast(Sharded):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def rounded(make: Any = LitLoRA) -> LitLoRA:
    model = make()
    quantize_frozen_weights(model, 4).remove()
    return model


def fit(make_trainer: Any, *callbacks: Any, make: Any, ckpt_path: Any = None, **options: Any) -> Any:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        leave_group()  # of the run before
    pl.seed_everything(0, verbose=False)
    model = make()
    options = {"limit_val_batches": 0, "use_distributed_sampler": False, **options}
    make_trainer(callbacks=list(callbacks), **options).fit(model, ckpt_path=ckpt_path)
    return model


def on_each_rank(folder: Any, make_trainer: Any, strategy: Any, expected: Any) -> None:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    run = partial(fit, make_trainer, make=Sharded, devices=2)
    model = run(QuantizeFrozenWeights(4), ActivationCheckpointing(["net.up", "net.down"]), strategy=strategy("full"))
    assert model.local_bytes == 0.5625 * NUM_QUANTIZED / 2
    packed = {name for name, value in model.seen.items() if value.dtype is torch.uint8}
    assert len(packed) == 5
    for name, value in expected.items():
        assert name in packed or (model.seen[name] - value).abs().max() <= 1e-6, name
    for name in packed:  # as they are read from parameters()
        assert torch.equal(model.read[name], expected[name])
        assert model.shapes[name] == (expected[name].shape, expected[name].chunk(2)[dist.get_rank()].shape)
    for form, save in (("full", "trainable"), ("sharded", "all")):
        path, quantize = folder / f"{form}.ckpt", partial(QuantizeFrozenWeights, 4, save=save)
        run(quantize(), Saving(path), strategy=strategy(form))
        dist.barrier()
        resumed = run(quantize(), strategy=strategy(form), ckpt_path=path)
        assert all(torch.equal(resumed.seen[name], value) for name, value in model.seen.items()), form
    if strategy is Inside:
        check_casts_and_plain_files(folder, run)


def check_casts_and_plain_files(folder: Any, run: Any) -> None:
    """What is particular to users' own FSDP2."""
    ours, theirs = (
        run(*callbacks, make=make, strategy=Inside("full"), max_epochs=1)
        for make, callbacks in ((Cast, [QuantizeFrozenWeights(4)]), (partial(rounded, make=Cast), []))
    )
    trained = {name for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert all(torch.equal(ours.seen[name], theirs.seen[name]) for name in trained)
    run(Saving(folder / "plain.ckpt"), make=Sharded, strategy=Inside("full"), max_epochs=1)
    dist.barrier()
    message = (
        "the checkpoint has net.embed.weight in full precision, and Inside would load it into quantized shards: "
        "load it in __init__, or use strategy='fsdp_offload'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        run(QuantizeFrozenWeights(4), strategy=Inside("full"), ckpt_path=folder / "plain.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Inside, Offload])
def test_two_ranks_are_one_and_resumed_runs_end_at_the_same_bits(strategy, make_trainer, tmp_path):
    expected = fit(make_trainer, make=rounded).state_dict()
    run_ranks(2, on_each_rank, tmp_path, make_trainer, strategy, expected)


def test_a_run_on_one_device_is_that_of_decoded_weights(make_trainer):
    options = {"max_epochs": 1, "precision": "bf16-mixed"}
    layers = ["net.up", "net.down"]
    ours, theirs = (
        fit(make_trainer, *callbacks, ActivationCheckpointing(layers), make=make, strategy=ForkingOffload(), **options)
        for make, callbacks in ((LitLoRA, [QuantizeFrozenWeights(4)]), (rounded, []))
    )
    assert_equal_weights(ours, theirs)


ON_ONE_RANK = pytest.mark.parametrize("strategy", [partial(ModelParallelStrategy, 1, 1), ForkingOffload])


class Writing(Sharded):
    def on_train_start(self) -> None:
        named = dict(self.net.named_parameters())
        for weight in (self.net.head.weight, named["head.weight"], named["up.base_layer.weight"]):
            for write in (lambda p: p.data.mul_(2), lambda p: p.zero_(), lambda p: setattr(p, "data", p + 1)):
                with pytest.raises(RuntimeError, match=r"^the weight of 'net\.\S+' is quantized to 4"):
                    write(weight)


@ON_ONE_RANK
def test_what_would_change_a_sharded_weight_is_refused(strategy, make_trainer):
    model = fit(make_trainer, QuantizeFrozenWeights(4), make=Writing, strategy=strategy(), max_epochs=1)
    other = fit(make_trainer, QuantizeFrozenWeights(4), make=Sharded, strategy=strategy(), max_epochs=1)
    assert_equal_weights(model, other)


def test_a_plain_checkpoint_is_loaded_into_bits_on_the_host(make_trainer, tmp_path):
    fit(make_trainer, Saving(tmp_path / "plain.ckpt"), make=LitLoRA)
    for strategy in ("auto", ForkingOffload()):
        model = LitLoRA()
        trainer = make_trainer(callbacks=[QuantizeFrozenWeights(4, keep=True)], strategy=strategy)
        trainer.validate(model, ckpt_path=tmp_path / "plain.ckpt", verbose=False)
        leave_group()
        if strategy == "auto":
            expected = model
    assert_equal_weights(model, expected)


# --- what is refused ---


@pytest.mark.parametrize("strategy", [Inside, Offload])
def test_folders_without_frozen_weights_are_refused(strategy, make_trainer):
    trainer = make_trainer(callbacks=[QuantizeFrozenWeights(save="trainable")], strategy=strategy("sharded"))
    message = (
        "QuantizeFrozenWeights(save='trainable') does not work with sharded checkpoints, which need all parameters: "
        "save full ones, or use save='all'."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        trainer.callbacks[0].setup(trainer, LitLoRA(), "fit")


def test_layers_without_memory_are_refused_under_fsdp2(make_trainer):
    trainer = make_trainer(callbacks=[QuantizeFrozenWeights()], strategy=Inside("full"))
    trainer.strategy.connect(LitLoRA().to("meta"))
    message = (
        "QuantizeFrozenWeights does not work with Inside where configure_model leaves layers on the meta device: "
        "Lightning would empty the quantized ones, too. Make them on the host, or in __init__, or use "
        "strategy='fsdp_offload'."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        trainer.callbacks[0]._apply(trainer)


def test_a_torch_that_shards_no_integers_is_refused(make_trainer, monkeypatch):
    monkeypatch.setattr(callback.fsdp2, "shards_integers", False)
    message = (
        f"QuantizeFrozenWeights with ForkingOffload needs torch >= 2.13, got {torch.__version__}, whose FSDP2 shards "
        "no integers: use 'ddp' or a single device."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        make_trainer(strategy=ForkingOffload(), callbacks=[QuantizeFrozenWeights(4)]).fit(LitLoRA())
