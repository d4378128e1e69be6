"""The plugin with every callback of the package, with DDP and with FSDP2."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from support.helpers import Forking, LitTiny, TinyCNN, TinyGPT, assert_equal_weights
from support.parts import KEEPS_RESULT, from_config
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_vram import (
    ActivationCheckpointing,
    InPlaceFusion,
    LeanMixedPrecision,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SETTINGS = {
    "fp16": {"precision": "fp16", "recast_in_backward": True},
    "lean": {"precision": "bf16", "recast_in_backward": True, "parameters": "bf16+split"},
}


def make_plugin(kind, net=TinyCNN):
    norms = {"low_precision_norms": True, "fp32_modules": ["net.blocks.1.linear2"]} if net is TinyGPT else {}
    return LeanMixedPrecision(**SETTINGS[kind], **norms)


def build(net, module=LitTiny):
    pl.seed_everything(0, verbose=False)
    return module(net())


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("name", KEEPS_RESULT)
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("net", [TinyCNN, TinyGPT])
def test_a_callback_changes_nothing_under_the_plugin(name, kind, net, make_trainer):
    if (name, kind) == ("OptimizerInBackward", "lean"):
        pytest.skip("is refused with bf16 weights, which something else steps already")
    callback, fitted = from_config(name), []
    for callbacks in ([], [callback]):
        model = build(net)
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
        make_trainer(callbacks=callbacks, plugins=[make_plugin(kind, net)], **options).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_all_together_change_nothing(kind, make_trainer):
    refused = {"OptimizerInBackward"} if kind in ("fp16", "lean") else set()
    callbacks, fitted = [from_config(name) for name in KEEPS_RESULT if name not in refused], []
    for parts in ([], callbacks):
        model = build(TinyGPT)
        make_trainer(callbacks=parts, plugins=[make_plugin(kind, TinyGPT)]).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)


class NormThenActivation(TinyCNN):
    def __init__(self):
        nn.Sequential.__init__(self, nn.Flatten(), nn.Linear(192, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 10))


@pytest.mark.parametrize("fp32_modules", [(), nn.LayerNorm], ids=["low norms", "island"])
def test_norms_in_16_bit_are_fused_or_left_alone(fp32_modules, make_trainer):
    fitted = []
    for callbacks in ([], [InPlaceFusion()]):
        model = build(NormThenActivation)
        plugin = LeanMixedPrecision("bf16", low_precision_norms=not fp32_modules, fp32_modules=fp32_modules)
        make_trainer(callbacks=callbacks, plugins=[plugin]).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)


@pytest.mark.quick_sample(2)
@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_results_on_two_ranks_are_those_of_lightning(precision, make_model, make_trainer):
    fitted = []
    for plugin in (MixedPrecision(precision, "cpu"), LeanMixedPrecision(precision, recast_in_backward=True)):
        model = make_model()
        make_trainer(plugins=[plugin], strategy="ddp_fork", devices=2, max_epochs=1, gradient_clip_val=0.1).fit(model)
        fitted.append(model)
    assert_equal_weights(*fitted)


class Replicas(LitTiny):
    def on_train_end(self):
        torch.save([p.detach().clone() for p in self.parameters()], f"{self.path}/{self.global_rank}.pt")


class OtherOnEachRank(Replicas):
    """As of a script without a seed, of which DDP broadcasts the weights of the first rank."""

    def configure_model(self):
        torch.manual_seed(self.global_rank)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        self.net.blocks[0].linear1.requires_grad_(False)

    def on_train_end(self):
        weights = self.trainer.strategy.lightning_module_state_dict()
        torch.save(list(weights.values()), f"{self.path}/{self.global_rank}.pt")


@pytest.mark.distributed
@pytest.mark.parametrize("parameters", ["bf16+master", "bf16+split", "bf16+kahan"])
def test_replicas_that_begin_with_other_weights_become_equal(parameters, make_trainer, tmp_path):
    model = build(TinyGPT, OtherOnEachRank)
    model.path = tmp_path
    plugin = LeanMixedPrecision("bf16", parameters=parameters)
    make_trainer(plugins=[plugin], strategy="ddp_fork", devices=2, max_epochs=1).fit(model)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert all(map(torch.equal, one, other))
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in one)


class Sharded(LitTiny):
    inf_at = None

    def configure_model(self):
        for part in [*self.net.blocks, self.net] if isinstance(self.net, TinyGPT) else [self.net[0], self.net]:
            if not isinstance(next(part.parameters()), DTensor):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.inf_at == (self.global_rank, batch_idx) else loss

    def on_train_end(self):
        scaler = self.trainer.precision_plugin.scaler
        weights = [p.full_tensor() for p in self.parameters()]
        torch.save((weights, scaler and scaler.get_scale()), f"{self.path}/{self.global_rank}.pt")

    def state_dict(self, **arguments):
        return {}  # the launcher cannot hand shards to the parent process


def fit_sharded(plugin, make_trainer, path, callbacks=(), inf_at=None):
    model = build(TinyGPT, Sharded)
    model.path, model.inf_at = path, inf_at
    options = {"max_epochs": 1, "limit_val_batches": 0, "gradient_clip_val": 0.1}
    make_trainer(plugins=[plugin], callbacks=[*callbacks], strategy=Forking(), devices=2, **options).fit(model)
    one, other = (torch.load(path / f"{rank}.pt") for rank in (0, 1))
    assert all(map(torch.equal, one[0], other[0]))
    assert one[1] == other[1]
    return one


@pytest.mark.slow_except("16-mixed")
@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_sharded_results_are_those_of_lightning(precision, make_trainer, tmp_path):
    plain = fit_sharded(MixedPrecision(precision, "cpu"), make_trainer, tmp_path)
    for callbacks in ([], [ActivationCheckpointing()]):
        ours = LeanMixedPrecision(precision, recast_in_backward=True)
        saving = fit_sharded(ours, make_trainer, tmp_path, callbacks)
        assert all(map(torch.equal, saving[0], plain[0]))


@pytest.mark.distributed
def test_an_inf_in_the_shard_of_one_rank_is_skipped_by_both(make_trainer, tmp_path):
    plugin = LeanMixedPrecision("fp16", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    weights, scale = fit_sharded(plugin, make_trainer, tmp_path, inf_at=(1, 1))
    assert scale == 512
    assert all(torch.isfinite(weight).all() for weight in weights)


@pytest.mark.distributed
def test_lean_parameters_that_are_sharded_are_refused(make_trainer, tmp_path):
    with pytest.raises(Exception, match="MixedPrecisionPolicy"):
        fit_sharded(LeanMixedPrecision("bf16", parameters="bf16+split"), make_trainer, tmp_path)
