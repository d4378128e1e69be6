import copy
import pickle
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import (
    LateTiny,
    LitApart,
    LitLinear,
    LitManual,
    LitTiny,
    TinyCNN,
    TinyGPT,
    assert_equal_weights,
    describe_module,
    fail_in,
)
from support.pages import assert_documented
from torch import Tensor, nn

from lightning_vram import LeanMixedPrecision

ROOT = Path(__file__).parents[2]
SCHEMES = ["bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic"]
OPTIONS = {"accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, "plain": {}}
ALL = {"recast_in_backward": True, "low_precision_norms": True, "parameters": "bf16+split", "fp32_modules": ["*.head"]}


def lightnings(precision):
    return MixedPrecision(precision, "cpu")


def fit(model, trainer):
    trainer.fit(model)
    return model


def build(net=TinyGPT, module=LitTiny):
    pl.seed_everything(0, verbose=False)
    return module(net())


def test_documented_and_configurable():
    assert_documented("LeanMixedPrecision")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # LightningCLI 2.6 within pytest
def test_the_configuration_file_makes_the_plugin():
    args = [f"--config={ROOT / 'configs' / 'lean_mixed_precision.yaml'}", "--model.net=support.helpers.TinyCNN"]
    trainer = LightningCLI(LitTiny, args=args, run=False, save_config_callback=None).trainer
    assert isinstance(trainer.precision_plugin, LeanMixedPrecision)


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_results_are_those_of_lightning_to_the_bit(precision, options, make_case, make_trainer):
    plain = fit(make_case(), make_trainer(plugins=[lightnings(precision)], **options))
    for plugin in (LeanMixedPrecision(precision), LeanMixedPrecision(precision, recast_in_backward=True)):
        assert_equal_weights(fit(make_case(), make_trainer(plugins=[plugin], **options)), plain)


def test_auto_is_bf16_on_a_cpu(make_trainer):
    plain = fit(build(), make_trainer(precision="bf16-mixed"))
    trainer = make_trainer(plugins=[LeanMixedPrecision()])
    assert_equal_weights(fit(build(), trainer), plain)
    assert trainer.precision == "bf16-mixed"


def test_auto_is_fp16_with_a_scaler_where_bf16_is_emulated(make_trainer, monkeypatch):
    monkeypatch.setattr("lightning_vram.precision.plugin.has_native_bf16", lambda device_type: False)
    plugin = LeanMixedPrecision("auto")
    trainer = make_trainer(plugins=[plugin])
    assert_equal_weights(fit(build(), trainer), fit(build(), make_trainer(plugins=[lightnings("16-mixed")])))
    assert trainer.precision == "16-mixed"
    assert plugin.scaler.get_scale() == 65536


class BackwardWithoutAutocast(MixedPrecision):
    """Lightning's, but for the backward of manual optimization: under autocast attention has other gradients."""

    def backward(self, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            super().backward(*args, **kwargs)


@pytest.mark.parametrize("module", [LitManual, LateTiny], ids=["manual optimization", "configure_model"])
def test_bf16_results_are_those_of_lightning_in(module, make_trainer):
    weights = []
    plain = BackwardWithoutAutocast("bf16-mixed", "cpu")
    for plugin in (plain, LeanMixedPrecision("bf16", recast_in_backward=True)):
        torch.manual_seed(0)
        weights.append(fit(module(TinyGPT()) if module is LitManual else module(), make_trainer(plugins=[plugin])))
    assert_equal_weights(*weights)


class Watched(LitApart):
    """Notes whether autocast is on, where it matters."""

    takes_closure = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():

            def closure(optimizer=optimizer):
                self.note("forward")
                optimizer.zero_grad()
                loss = self.loss(batch)
                loss.register_hook(lambda gradient: self.note("backward"))
                self.manual_backward(loss)

            if self.takes_closure:
                optimizer.step(closure=closure)
            else:
                closure()
                optimizer.step()

    def note(self, place):
        self.seen = {**getattr(self, "seen", {}), place: torch.is_autocast_enabled("cpu")}

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.note("step"))
        return optimizers


class WatchedClosure(Watched):
    takes_closure = True


class WatchedAutomatic(Watched):
    def __init__(self, net):
        LitTiny.__init__(self, net)

    def training_step(self, batch, batch_idx):
        self.note("forward")
        loss = self.loss(batch)
        loss.register_hook(lambda gradient: self.note("backward"))
        return loss

    def configure_optimizers(self):
        return super().configure_optimizers()[1]


@pytest.mark.parametrize("module", [WatchedAutomatic, Watched, WatchedClosure])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_ends_with_the_forward(module, precision, make_trainer):
    model = fit(build(TinyCNN, module), make_trainer(plugins=[LeanMixedPrecision(precision)]))
    assert model.seen == {"forward": True, "backward": False, "step": False}


def test_named_modules_run_in_fp32(make_trainer):
    model, seen = build(TinyGPT), {}

    def note(name):
        def hook(module, inputs, output):
            seen[name] = module.weight.dtype, output.dtype

        return hook

    for name in ("blocks.0.linear1", "blocks.1.linear1", "head"):
        model.net.get_submodule(name).register_forward_hook(note(name))
    plugin = LeanMixedPrecision("bf16", fp32_modules=["net.blocks.0", "net.head"], parameters="bf16+split")
    fit(model, make_trainer(plugins=[plugin]))
    assert seen["blocks.0.linear1"] == (torch.float32, torch.float32)  # no 16-bit tensor within the island
    assert seen["blocks.1.linear1"] == (torch.bfloat16, torch.bfloat16)
    assert seen["head"] == (torch.float32, torch.bfloat16)


def test_modules_that_nobody_calls_are_warned_about_once(make_trainer):
    plugin = LeanMixedPrecision("bf16", fp32_modules=["**.out_proj", "net.head"])
    with pytest.warns(UserWarning, match=r"did not call net\.blocks\.0\.self_attn\.out_proj") as caught:
        fit(build(TinyGPT), make_trainer(plugins=[plugin]))
    assert len([warning for warning in caught if "did not call" in str(warning.message)]) == 1
    assert "net.head" not in str(caught[0].message)


@pytest.mark.parametrize("kind", [nn.Linear, "Linear", "net.*"])
def test_patterns_of_fp32_modules(kind, make_trainer):
    plugin = LeanMixedPrecision("bf16", fp32_modules=kind)
    model = build(TinyCNN)
    dtypes = []
    model.net[-1].register_forward_pre_hook(lambda module, inputs: dtypes.append("_fp32_island" in vars(module)))
    fit(model, make_trainer(plugins=[plugin]))
    assert all(dtypes)


def test_norms_stay_in_16_bit(make_trainer):
    dtypes = []
    for is_low in (False, True):
        model = build(TinyGPT)
        model.net.blocks[0].norm1.register_forward_hook(lambda norm, inputs, output: dtypes.append(output.dtype))
        fit(model, make_trainer(plugins=[LeanMixedPrecision("bf16", low_precision_norms=is_low)], fast_dev_run=True))
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]  # in training and validation


@pytest.mark.parametrize("parameters", SCHEMES)
def test_lean_parameters_are_bf16_in_the_fit_and_what_they_were_after_it(parameters, make_case, make_trainer):
    model = make_case()
    before = describe_module(model), {name: p.dtype for name, p in model.named_parameters()}
    identities = list(map(id, model.parameters()))
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            norms = {p for part in pl_module.modules() if "Norm" in type(part).__name__ for p in part.parameters()}
            seen.append({p.dtype for p in pl_module.parameters() if p not in norms})

    plugin = LeanMixedPrecision("bf16", parameters=parameters)
    fit(model, make_trainer(plugins=[plugin], callbacks=[Look()]))
    assert all(dtypes == {torch.bfloat16} for dtypes in seen)
    assert (describe_module(model), {name: p.dtype for name, p in model.named_parameters()}) == before
    assert list(map(id, model.parameters())) == identities


@pytest.mark.parametrize("parameters", ["bf16+master", "bf16+split"])
def test_exact_schemes_step_as_in_float32_and_give_back_what_bf16_cannot_hold(parameters, make_trainer):
    plugin = LeanMixedPrecision("bf16", parameters=parameters)
    fitted = fit(build(TinyGPT, LitLinear), make_trainer(plugins=[plugin]))
    assert_equal_weights(fitted, fit(build(TinyGPT, LitLinear), make_trainer()))
    weight = fitted.net.head.weight
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")  # an evaluation that fails leaves it so
@pytest.mark.parametrize("place", ["setup", "configure_optimizers", "training_step", "on_validation_end", "teardown"])
def test_a_fit_that_fails_leaves_the_module_as_it_was(place, make_trainer):
    model = build(TinyGPT)
    before, dtypes = describe_module(model), {p.dtype for p in model.parameters()}
    plugin = LeanMixedPrecision("bf16", **ALL)
    trainer = make_trainer(plugins=[plugin])
    fail_in(model, place, trainer)
    assert "lightning_module_state_dict" not in vars(trainer.strategy)
    assert (describe_module(model), {p.dtype for p in model.parameters()}) == (before, dtypes)
    fit(model, make_trainer(plugins=[plugin]))
    assert describe_module(model) == before


@pytest.mark.filterwarnings("ignore:.*the first training step did not call")  # the linear layers of attention
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_module_is_what_it_was_after_each_run(precision, make_case, make_trainer):
    model = make_case()
    before = describe_module(model)
    options = {"recast_in_backward": True, "fp32_modules": nn.Linear}
    trainer = make_trainer(plugins=[LeanMixedPrecision(precision, **options)])
    for run in (trainer.fit, trainer.fit, trainer.validate, trainer.test, trainer.predict):
        if run in (trainer.fit, trainer.validate) or isinstance(model, LitTiny):
            run(model)
        assert describe_module(model) == before


def test_named_modules_run_in_fp32_in_evaluations_too(make_trainer):
    model, seen = build(TinyGPT), []  # transformer layers have a fast path there
    model.net.blocks[0].linear1.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].dtype))
    make_trainer(plugins=[LeanMixedPrecision("bf16", fp32_modules=["net.blocks.0"])]).validate(model)
    assert seen == [torch.float32]
    assert torch.backends.mha.get_fastpath_enabled()


class ByType(LitTiny):
    """Makes groups of parameters by the type of their layers, as the examples of many do."""

    def configure_optimizers(self):
        linear = [p for part in self.modules() if type(part) is nn.Linear for p in part.parameters()]
        assert len(linear) == 2
        return torch.optim.AdamW([{"params": linear, "weight_decay": 0.1}])


def test_layers_are_told_by_their_type_where_groups_are_made(make_trainer):
    fit(build(TinyCNN, ByType), make_trainer(plugins=[LeanMixedPrecision("bf16", recast_in_backward=True)]))


def test_a_frozen_backbone_trains_with_all_settings(make_trainer):
    model = build(TinyGPT)
    model.net.blocks[0].requires_grad_(False)
    options = {"recast_in_backward": True, "parameters": "bf16+split", "low_precision_norms": True}
    before = [p.clone() for p in model.net.blocks[0].parameters()]
    fit(model, make_trainer(plugins=[LeanMixedPrecision("bf16", **options)], max_epochs=5))
    assert all(map(torch.equal, model.net.blocks[0].parameters(), before))


class Adversaries(pl.LightningModule):
    """A generator and a discriminator, whose optimizers step in one training step."""

    def __init__(self, *, is_one_graph: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.other = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        halves = self.frozen.weight.bfloat16().float().view(torch.int32).bitwise_or(0x8000).view(torch.float32)
        self.frozen.weight.data.copy_(halves)
        self.automatic_optimization, self.is_one_graph = False, is_one_graph

    def training_step(self, batch: Any, batch_idx: int) -> None:
        made = self.frozen(self.net(batch))
        judged = self.other(made if self.is_one_graph else made.detach())
        first, second = self.optimizers()
        self.toggle(second, judged.square().mean(), retain_graph=self.is_one_graph)
        self.toggle(first, (judged if self.is_one_graph else self.other(made)).exp().mean())

    def toggle(self, optimizer: Any, loss: Tensor, **options: Any) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss, **options)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), 1e-2) for part in (self.net, self.other)]

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4)


@pytest.mark.parametrize("scheme", ["bf16+master", "bf16+stochastic"])
def test_a_step_before_the_last_backward_of_a_forward_is_an_error_that_tells_why(scheme, make_trainer):
    model = Adversaries(is_one_graph=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation(?s:.)*it has overwritten weights"):
        make_trainer(plugins=[LeanMixedPrecision("bf16", parameters=scheme)]).fit(model)
    make_trainer(plugins=[LeanMixedPrecision("bf16")], max_epochs=1).fit(Adversaries(is_one_graph=True))


class Pickles(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        assert pickle.dumps(trainer)
        assert copy.deepcopy(trainer.precision_plugin)._run is None


@pytest.mark.parametrize("plugin", [LeanMixedPrecision("bf16", **ALL), LeanMixedPrecision("fp16")], ids=["all", "fp16"])
def test_the_trainer_can_be_pickled_within_the_fit(plugin, make_trainer):
    fit(build(TinyGPT), make_trainer(plugins=[plugin], callbacks=[Pickles()], limit_val_batches=0))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("part", ["whole", "layer"])
def test_results_are_those_of_lightning_when_compiled(part, make_trainer):
    fitted = []
    for plugin in (lightnings("bf16-mixed"), LeanMixedPrecision("bf16", recast_in_backward=True)):
        torch._dynamo.reset()
        model = build(TinyCNN)
        if part == "layer":
            model.net.compile(backend="aot_eager")
        compiled = torch.compile(model, backend="aot_eager") if part == "whole" else model
        make_trainer(plugins=[plugin], max_epochs=1, limit_val_batches=0).fit(compiled)
        fitted.append(model)
    assert_equal_weights(*fitted)


class PastThePlugin(LitManual):
    """Steps a fused optimizer, which leaves no trace on the weights, between a forward and its backward."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        optimizer.step()
        self.manual_backward(loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


def test_steps_past_the_plugin_are_noticed(make_trainer):
    plugin = LeanMixedPrecision("bf16", recast_in_backward=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation(?s:.)*step after all backwards"):
        fit(build(TinyCNN, PastThePlugin), make_trainer(plugins=[plugin]))


# --- refusals ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "bf16-true"}, "must be 'auto', 'bf16', 'fp16', 'bf16-mixed' or '16-mixed', got 'bf16-true'"),
        ({"parameters": "bf16"}, "(parameters) must be 'fp32', 'bf16+master', 'bf16+split', 'bf16+kahan' or 'bf16+"),
        ({"on_overflow_limit": "stop"}, "(on_overflow_limit) must be 'error', 'bf16' or 'fp32', got 'stop'"),
        ({"max_consecutive_overflows": 0}, "(max_consecutive_overflows)"),
        ({"fp32_modules": ["auto"]}, "(fp32_modules) cannot be 'auto': name the modules that need float32"),
        ({"fp32_modules": [""]}, "(fp32_modules) must name at least one layer"),
        ({"precision": "fp16", "parameters": "bf16+split"}, "needs precision='bf16', got 'fp16'"),
        ({"precision": "bf16", "scaler": torch.amp.GradScaler("cpu")}, "is for 'fp16', got one with 'bf16'"),
    ],
)
def test_wrong_values_are_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LeanMixedPrecision(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"precision": 16},
        {"fp32_modules": [1]},
        {"fp32_modules": None},
        {"scaler": 65536.0},
        {"low_precision_norms": "no"},
        {"recast_in_backward": None},
        {"hold_lr_on_overflow": 1},
    ],
)
def test_wrong_types_are_refused(arguments):
    with pytest.raises(TypeError, match=r"LeanMixedPrecision\(\w+\) must be"):
        LeanMixedPrecision(**arguments)


def test_patterns_that_match_nothing_are_refused(make_trainer):
    model = build(TinyGPT)
    before = describe_module(model)
    with pytest.raises(ValueError, match=r"^LeanMixedPrecision: fp32_modules='net.haed' matches no module.*net.head"):
        make_trainer(plugins=[LeanMixedPrecision("bf16", fp32_modules=["net.blocks.0", "net.haed"])]).fit(model)
    assert describe_module(model) == before


def test_norms_that_are_not_there_are_refused(make_trainer):
    with pytest.raises(ValueError, match="low_precision_norms=True finds no LayerNorm or RMSNorm in LitTiny"):
        make_trainer(plugins=[LeanMixedPrecision("bf16", low_precision_norms=True)]).fit(build(TinyCNN))


def test_auto_with_lean_parameters_is_refused_where_there_is_no_bf16(make_trainer, monkeypatch):
    monkeypatch.setattr("lightning_vram.precision.plugin.has_native_bf16", lambda device_type: False)
    with pytest.raises(ValueError, match="needs precision='bf16', got 'fp16'"):
        make_trainer(plugins=[LeanMixedPrecision("auto", parameters="bf16+split")]).fit(build(TinyCNN))


def test_two_precisions_are_refused_by_the_trainer(make_trainer):
    with pytest.raises(MisconfigurationException, match=r"multiple values for Precision flags in `plugins`"):
        make_trainer(plugins=[LeanMixedPrecision("bf16"), LeanMixedPrecision("bf16")])
    with pytest.raises(ValueError, match=r"precision=bf16-mixed. and .plugins=LeanMixedPrecision\('bf16-mixed'\)"):
        make_trainer(plugins=[LeanMixedPrecision("bf16")], precision="bf16-mixed")


class HalfLoaded(LitTiny):
    def __init__(self, net):
        super().__init__(net.bfloat16())


def test_plain_bf16_weights_are_refused(make_trainer):
    with pytest.raises(ValueError, match=r"AdamW.*bfloat16.*\(\"bf16\", parameters=\"bf16\+split\"\)"):
        make_trainer(plugins=[LeanMixedPrecision("bf16")]).fit(build(TinyCNN, HalfLoaded))


def test_averages_of_rounded_parameters_are_refused(make_trainer):
    plugin = LeanMixedPrecision("bf16", parameters="bf16+split")
    with pytest.raises(
        MisconfigurationException,
        match=r"^LeanMixedPrecision\(parameters='bf16\+split'\) does not work with StochasticWeightAveraging, which "
        r"averages weights that bfloat16 has rounded: use WeightAveraging, or 'fp32'\. Leave one out\.$",
    ):
        fit(build(TinyCNN), make_trainer(plugins=[plugin], callbacks=[StochasticWeightAveraging(1e-2)]))


def test_pruning_of_lean_parameters_is_refused_and_leaves_the_module_as_it_was(make_trainer):
    model = build(TinyCNN)
    before = describe_module(model)
    plugin = LeanMixedPrecision("bf16", parameters="bf16+split")
    with pytest.raises(
        MisconfigurationException,
        match=r"^LeanMixedPrecision\(parameters='bf16\+split'\) does not work with ModelPruning, which puts other "
        r"parameters, in float32, and masks into the module: use 'fp32'\. Leave one out\.$",
    ):
        fit(model, make_trainer(plugins=[plugin], callbacks=[ModelPruning("l1_unstructured")]))
    assert describe_module(model) == before
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}


class WithLBFGS(LitTiny):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"precision": "fp16"}, MisconfigurationException, "cannot skip a step of LBFGS.*use precision='bf16'"),
        ({"precision": "bf16", "parameters": "bf16+kahan"}, ValueError, "LBFGS.*Adam, .*AdamW"),
    ],
)
def test_lbfgs_is_refused(options, error, message, make_trainer):
    model = build(TinyCNN, WithLBFGS)
    before = describe_module(model)
    with pytest.raises(error, match=message):
        fit(model, make_trainer(plugins=[LeanMixedPrecision(**options)]))
    assert describe_module(model) == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_lbfgs_works_in_bf16(make_trainer):
    fitted = [
        fit(build(TinyCNN, WithLBFGS), make_trainer(plugins=[plugin], max_epochs=1))
        for plugin in (lightnings("bf16-mixed"), LeanMixedPrecision("bf16"))
    ]
    assert_equal_weights(*fitted)
