import copy
import pickle
import re
from functools import partial
from pathlib import Path

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
    describe_module,
    fail_in,
)
from support.pages import assert_documented
from support.written_nets import WAYS, Averaged
from torch import nn

from lightning_vram import LeanMixedPrecision
from lightning_vram.precision.plugin import resolve_precision

ROOT = Path(__file__).parents[2]
SCHEMES = ["bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic"]
ALL = {"recast_in_backward": True, "low_precision_norms": True, "parameters": "bf16+split", "fp32_modules": ["*.head"]}


def lightnings(precision):
    return {"plugins": [MixedPrecision(precision, "cpu")]}


def lit_gpt():
    return LitTiny(TinyGPT())


def lit_cnn():
    return LitTiny(TinyCNN())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # LightningCLI 2.6 within pytest
def test_it_is_documented_and_its_configuration_file_makes_it():
    assert_documented("LeanMixedPrecision")
    args = [f"--config={ROOT / 'configs' / 'lean_mixed_precision.yaml'}", "--model.net=support.helpers.TinyCNN"]
    trainer = LightningCLI(LitTiny, args=args, run=False, save_config_callback=None).trainer
    assert isinstance(trainer.precision_plugin, LeanMixedPrecision)


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("recasts", [False, True])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_results_are_those_of_lightning_to_the_bit(precision, recasts, make_case, same_as_baseline):
    plugin = LeanMixedPrecision(precision, recast_in_backward=recasts)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    same_as_baseline(make_case, plugins=[plugin], baseline=lightnings(precision), **options)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_auto_is_bf16_or_fp16_with_a_scaler_where_that_is_emulated(precision, same_as_baseline, monkeypatch):
    monkeypatch.setattr("lightning_vram.precision.plugin.has_native_bf16", lambda _: precision == "bf16-mixed")
    plugin = LeanMixedPrecision()
    model, _ = same_as_baseline(lit_gpt, plugins=[plugin], baseline=lightnings(precision))
    assert model.trainer.precision == precision
    assert (plugin.scaler is not None) == (precision == "16-mixed")


class BackwardWithoutAutocast(MixedPrecision):
    """Lightning's, but for the backward of manual optimization: under autocast attention has other gradients."""

    def backward(self, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            super().backward(*args, **kwargs)


@pytest.mark.parametrize("make", [lambda: LitManual(TinyGPT()), LateTiny], ids=["manual", "configure_model"])
def test_bf16_results_are_those_of_lightning_in_manual_optimization_and_configure_model(make, same_as_baseline):
    plugin = LeanMixedPrecision("bf16", recast_in_backward=True)
    same_as_baseline(make, plugins=[plugin], baseline={"plugins": [BackwardWithoutAutocast("bf16-mixed", "cpu")]})


class Closures(LitApart):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.step(closure=lambda optimizer=optimizer: self.backward_of(batch, optimizer))

    def backward_of(self, batch, optimizer):
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))


def watched(kind, seen):
    """Note whether autocast is on in the forward, the backward and the step."""

    def note(place):
        seen[place] = torch.is_autocast_enabled("cpu")

    class Watched(kind):
        def loss(self, batch):
            note("forward")
            loss = super().loss(batch)
            loss.register_hook(lambda gradient: note("backward"))
            return loss

        def configure_optimizers(self):
            optimizers = super().configure_optimizers()
            for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
                optimizer.register_step_pre_hook(lambda *_: note("step"))
            return optimizers

    return Watched(TinyCNN())


@pytest.mark.parametrize(
    ("precision", "kind"), [("bf16", LitTiny), ("fp16", LitTiny), ("bf16", Closures), ("fp16", LitApart)]
)
def test_autocast_ends_with_the_forward(precision, kind, fit):
    seen = {}
    fit(lambda: watched(kind, seen), plugins=[LeanMixedPrecision(precision)])
    assert seen == {"forward": True, "backward": False, "step": False}


def note(model, *names):
    """Note dtypes of the weight and the output of named modules."""
    seen = {}
    for name in names:
        model.net.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: seen.update({name: (module.weight.dtype, output.dtype)})
        )
    return seen


def test_named_modules_run_in_fp32_in_training_and_evaluation(make_trainer):
    model = lit_gpt()
    names = ("blocks.0.linear1", "blocks.1.linear1", "head")
    plugin = LeanMixedPrecision("bf16", fp32_modules=["net.blocks.0", "net.head"], parameters="bf16+split")
    trainer = make_trainer(plugins=[plugin], max_epochs=1, limit_val_batches=0)
    full, low = torch.float32, torch.bfloat16
    seen = note(model, *names)
    trainer.fit(model)
    # no 16-bit tensor within the island
    assert seen == {names[0]: (full, full), names[1]: (low, low), names[2]: (full, low)}
    trainer.limit_val_batches = 1.0
    seen.clear()
    trainer.validate(model, verbose=False)  # transformer layers have a fast path there
    assert seen["blocks.0.linear1"] == (full, full)
    assert torch.backends.mha.get_fastpath_enabled()


def test_modules_that_nobody_calls_are_warned_about_once(fit):
    plugin = LeanMixedPrecision("bf16", fp32_modules=["**.out_proj", "net.head"])
    with pytest.warns(UserWarning, match=r"did not call net\.blocks\.0\.self_attn\.out_proj") as caught:
        fit(lit_gpt, plugins=[plugin])
    assert len([warning for warning in caught if "did not call" in str(warning.message)]) == 1
    assert "net.head" not in str(caught[0].message)


@pytest.mark.parametrize("kind", [nn.Linear, "Linear", "net.*"])
def test_patterns_of_fp32_modules(kind, fit):
    found = []

    class Looks(LitTiny):
        def on_train_start(self):
            found.append("_fp32_island" in vars(self.net[-1]))

    fit(lambda: Looks(TinyCNN()), plugins=[LeanMixedPrecision("bf16", fp32_modules=kind)])
    assert found == [True]


def test_norms_stay_in_16_bit(make_trainer):
    dtypes = []
    for is_low in (False, True):
        model = lit_gpt()
        model.net.blocks[0].norm1.register_forward_hook(lambda norm, inputs, output: dtypes.append(output.dtype))
        make_trainer(plugins=[LeanMixedPrecision("bf16", low_precision_norms=is_low)], fast_dev_run=True).fit(model)
    assert dtypes == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]  # in training and validation


@pytest.mark.parametrize("parameters", SCHEMES)
def test_lean_parameters_are_bf16_in_the_fit_and_what_they_were_after_it(parameters, fit):
    model = lit_gpt()
    before = describe_module(model), {name: p.dtype for name, p in model.named_parameters()}
    identities = list(map(id, model.parameters()))
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            norms = {p for part in pl_module.modules() if "Norm" in type(part).__name__ for p in part.parameters()}
            seen.append({p.dtype for p in pl_module.parameters() if p not in norms})

    fit(lambda: model, Look(), plugins=[LeanMixedPrecision("bf16", parameters=parameters)])
    assert all(dtypes == {torch.bfloat16} for dtypes in seen)
    assert (describe_module(model), {name: p.dtype for name, p in model.named_parameters()}) == before
    assert list(map(id, model.parameters())) == identities


@pytest.mark.parametrize("parameters", ["bf16+master", "bf16+split"])
def test_exact_schemes_step_as_in_float32_and_give_back_what_bf16_cannot_hold(parameters, same_as_baseline):
    plugin = LeanMixedPrecision("bf16", parameters=parameters)
    fitted, _ = same_as_baseline(lambda: LitLinear(TinyGPT()), plugins=[plugin])
    weight = fitted.net.head.weight
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")  # an evaluation that fails leaves it so
@pytest.mark.parametrize("place", ["setup", "configure_optimizers", "training_step", "on_validation_end"])
def test_a_fit_that_fails_leaves_the_module_as_it_was(place, make_trainer):
    model = lit_gpt()
    before, dtypes = describe_module(model), {p.dtype for p in model.parameters()}
    plugin = LeanMixedPrecision("bf16", **ALL)
    trainer = make_trainer(plugins=[plugin])
    fail_in(model, place, trainer)
    assert "lightning_module_state_dict" not in vars(trainer.strategy)
    assert (describe_module(model), {p.dtype for p in model.parameters()}) == (before, dtypes)
    make_trainer(plugins=[plugin], max_epochs=1).fit(model)
    assert describe_module(model) == before


@pytest.mark.filterwarnings("ignore:.*the first training step did not call")  # the linear layers of attention
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_module_is_what_it_was_after_each_run(precision, make_model, make_trainer):
    model = make_model()
    before = describe_module(model)
    plugin = LeanMixedPrecision(precision, recast_in_backward=True, fp32_modules=nn.Linear)
    trainer = make_trainer(plugins=[plugin], max_epochs=1)
    for run in (trainer.fit, trainer.fit, trainer.validate, trainer.test, trainer.predict):
        run(model)
        assert describe_module(model) == before


class ByType(LitTiny):
    """Makes groups of parameters by the type of their layers, as the examples of many do."""

    def configure_optimizers(self):
        linear = [p for part in self.modules() if type(part) is nn.Linear for p in part.parameters()]
        assert len(linear) == 2
        return torch.optim.AdamW([{"params": linear, "weight_decay": 0.1}])


def test_layers_are_told_by_their_type_where_groups_are_made(fit):
    fit(lambda: ByType(TinyCNN()), plugins=[LeanMixedPrecision("bf16", recast_in_backward=True)])


class StepsBetweenBackwards(LitApart):
    """As some GANs: one optimizer steps between two backwards of the same forward."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch).exp()
        self.manual_backward(loss, retain_graph=True)
        first.step()
        self.manual_backward(loss)
        second.step()


class PastThePlugin(LitManual):
    """The same with a fused optimizer, which leaves no trace on the weights, past Lightning."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        optimizer.step()
        self.manual_backward(loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (StepsBetweenBackwards, {"parameters": "bf16+master"}),
        (StepsBetweenBackwards, {"parameters": "bf16+stochastic"}),
        (PastThePlugin, {"recast_in_backward": True}),
    ],
)
def test_a_step_before_the_last_backward_of_a_forward_is_an_error_that_tells_why(module, options, fit):
    why = r"modified by an inplace operation(?s:.)*it has overwritten weights(?s:.)*step after all backwards"
    with pytest.raises(RuntimeError, match=why):
        fit(lambda: module(TinyCNN()), plugins=[LeanMixedPrecision("bf16", **options)])


class Pickles(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        assert pickle.dumps(trainer)
        assert copy.deepcopy(trainer.precision_plugin)._run is None


@pytest.mark.parametrize("plugin", [LeanMixedPrecision("bf16", **ALL), LeanMixedPrecision("fp16")], ids=["all", "fp16"])
def test_the_trainer_can_be_pickled_within_the_fit(plugin, fit):
    fit(lit_gpt, Pickles(), plugins=[plugin])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # dynamo's
def test_results_are_those_of_lightning_when_compiled(same_as_baseline):
    def make():
        torch._dynamo.reset()
        model = lit_cnn()
        model.net.compile(backend="aot_eager")
        return model

    plugin = LeanMixedPrecision("bf16", recast_in_backward=True)
    same_as_baseline(make, plugins=[plugin], baseline=lightnings("bf16-mixed"))


# --- the choice of a format ---

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


@pytest.mark.parametrize(
    ("device_type", "why"),
    [("meta", "unsupported autocast device_type"), pytest.param("cuda", "CUDA is not available", marks=NO_CUDA)],
)
@pytest.mark.parametrize(("name", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_a_device_without_autocast_is_refused_in_its_own_words(device_type, why, name, other):
    message = rf"\(precision='{name}'\) does not work on '{device_type}' devices: .*{why}.*Use '{other}'"
    with pytest.raises(MisconfigurationException, match=message):
        resolve_precision({"fp16": "16-mixed", "bf16": "bf16-mixed"}[name], device_type)


@pytest.mark.parametrize(("is_native", "precision"), [(True, "bf16-mixed"), (False, "16-mixed")])
def test_auto_asks_for_hardware_not_for_emulation(is_native, precision, monkeypatch):
    def is_bf16_supported(including_emulation=True):
        return is_native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    monkeypatch.setattr(torch, "autocast", lambda device_type, dtype: None)
    assert resolve_precision(None, "cuda") == precision


def test_auto_is_fp16_on_mps():
    assert resolve_precision(None, "mps") == "16-mixed"


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
    model = lit_gpt()
    before = describe_module(model)
    with pytest.raises(ValueError, match=r"^LeanMixedPrecision: fp32_modules='net.haed' matches no module.*net.head"):
        make_trainer(plugins=[LeanMixedPrecision("bf16", fp32_modules=["net.blocks.0", "net.haed"])]).fit(model)
    assert describe_module(model) == before


def test_auto_with_lean_parameters_is_refused_where_there_is_no_bf16(fit, monkeypatch):
    monkeypatch.setattr("lightning_vram.precision.plugin.has_native_bf16", lambda device_type: False)
    with pytest.raises(ValueError, match="needs precision='bf16', got 'fp16'"):
        fit(lit_cnn, plugins=[LeanMixedPrecision("auto", parameters="bf16+split")])


def test_two_precisions_are_refused_by_the_trainer(make_trainer):
    with pytest.raises(MisconfigurationException, match=r"multiple values for Precision flags in `plugins`"):
        make_trainer(plugins=[LeanMixedPrecision("bf16"), LeanMixedPrecision("bf16")])
    with pytest.raises(ValueError, match=r"precision=bf16-mixed. and .plugins=LeanMixedPrecision\('bf16-mixed'\)"):
        make_trainer(plugins=[LeanMixedPrecision("bf16")], precision="bf16-mixed")


def test_plain_bf16_weights_are_refused(fit):
    with pytest.raises(ValueError, match=r"AdamW.*bfloat16.*\(\"bf16\", parameters=\"bf16\+split\"\)"):
        fit(lambda: lit_cnn().bfloat16(), plugins=[LeanMixedPrecision("bf16")])


class WithLBFGS(LitTiny):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


WITH = r"^LeanMixedPrecision\(parameters='bf16\+split'\) does not work with "


@pytest.mark.parametrize(
    ("module", "callbacks", "options", "error", "message"),
    [
        (
            LitTiny,
            [StochasticWeightAveraging(1e-2)],
            {"parameters": "bf16+split"},
            MisconfigurationException,
            WITH + r"StochasticWeightAveraging, which averages weights that bfloat16 has rounded: use WeightAveraging, "
            r"or 'fp32'\. Leave one out\.$",
        ),
        (
            LitTiny,
            [ModelPruning("l1_unstructured")],
            {"parameters": "bf16+split"},
            MisconfigurationException,
            WITH + r"ModelPruning, which puts other parameters, in float32, and masks into the module: use 'fp32'\. "
            r"Leave one out\.$",
        ),
        (WithLBFGS, [], {"precision": "fp16"}, MisconfigurationException, "a step of LBFGS.*use precision='bf16'"),
        (WithLBFGS, [], {"parameters": "bf16+kahan"}, ValueError, "LBFGS.*Adam, .*AdamW"),
    ],
    ids=["SWA", "pruning", "LBFGS in float16", "LBFGS of bf16 weights"],
)
def test_what_does_not_go_together_is_refused_and_the_module_is_what_it_was(
    module, callbacks, options, error, message, fit
):
    model = module(TinyCNN())
    before = describe_module(model)
    with pytest.raises(error, match=message):
        fit(lambda: model, *callbacks, plugins=[LeanMixedPrecision(**{"precision": "bf16", **options})])
    assert describe_module(model) == before
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}


def test_lbfgs_works_in_bf16(same_as_baseline):
    plugin = LeanMixedPrecision("bf16")
    same_as_baseline(lambda: WithLBFGS(TinyCNN()), plugins=[plugin], baseline=lightnings("bf16-mixed"))


@pytest.mark.parametrize("way", ["data =", "data.mul_", "foreach"])
def test_a_teacher_that_is_moved_by_hand_is_not_rounded(way, fit, same_as_baseline):
    plugin, move = LeanMixedPrecision("bf16", recast_in_backward=True), WAYS[way]
    same_as_baseline(lambda: Averaged("step", move), plugins=[plugin], baseline={"precision": "bf16-mixed"})
    lean = partial(LeanMixedPrecision, "bf16", parameters="bf16+split")
    with pytest.raises(RuntimeError, match=r"^The frozen parameter teacher\.\S+ is written at almost every step, and "):
        fit(lambda: Averaged("end of the batch", move), plugins=[lean()], max_epochs=2)
    named = fit(lambda: Averaged("end of the batch", move), plugins=[lean(fp32_modules=["teacher"])], max_epochs=2)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in named.teacher.parameters())
