"""``QuantizationAwareTraining``: whole runs, what they leave, and what is refused."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import (
    ForkingOffload,
    LitTiny,
    TinyCNN,
    TinyDigitsResNet,
    TinyGPT,
    assert_equal_weights,
    describe_module,
    saved_bytes,
)
from support.lora_nets import Saving

from lightning_vram import (
    ActivationCheckpointing,
    ActivationOffload,
    ChunkedLoss,
    EarlyRelease,
    InPlaceFusion,
    LeanMixedPrecision,
    LowBitOptimizer,
    MicroBatching,
    OptimizerInBackward,
    QuantizationAwareTraining,
    QuantizeFrozenWeights,
    TokenTiling,
    load_quantized,
    quantize_after_fit,
)
from lightning_vram.demos import ByteGPT
from lightning_vram.techniques.quantization_aware_training import apply_fake_quantization

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def fit(fit):
    def run(*callbacks: Any, net: Any = TinyCNN, make: Any = None, **options: Any) -> Any:
        return fit(make or (lambda: LitTiny(net())), *callbacks, **{"limit_val_batches": None, **options})

    return run


def differs(one, other):
    return any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_it_begins_with_its_epoch_and_a_resumed_run_ends_at_the_same_bits(fit, tmp_path):
    plain, path = fit(max_epochs=3), tmp_path / "last.ckpt"
    assert_equal_weights(fit(QuantizationAwareTraining(start_epoch=3), max_epochs=3), plain)
    callback, again = QuantizationAwareTraining(start_epoch=1), QuantizationAwareTraining(start_epoch=1)
    options = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    whole = fit(callback, max_epochs=3, **options)
    assert differs(whole, plain)
    fit(QuantizationAwareTraining(start_epoch=1), Saving(path), max_epochs=2, **options)
    assert torch.load(path, weights_only=True)["state_dict"].keys() == plain.state_dict().keys()
    resumed = fit(again, max_epochs=3, ckpt_path=path, **options)
    assert_equal_weights(resumed, whole)
    assert again.ranges.keys() == callback.ranges.keys() == {"net.0", "net.3", "net.8"}
    assert all(torch.equal(again.ranges[name], known) for name, known in callback.ranges.items())


@pytest.mark.parametrize(("net", "precision"), [(TinyCNN, "32-true"), (TinyGPT, "bf16-true")])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_saved_copy_computes_what_validation_of_the_run_saw(scheme, net, precision, fit, tmp_path):
    seen = []

    class Look(pl.Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, *_):
            seen[:] = [batch[0], pl_module.net(batch[0])]

    model = fit(QuantizationAwareTraining(scheme), Look(), net=net, precision=precision)
    path = f"{model.trainer.default_root_dir}/quantized.pt"
    loaded = load_quantized(LitTiny(net()), path).to(model.dtype)
    batch, result = seen
    assert torch.equal(loaded.net(batch), result)
    assert not torch.equal(model.eval().net(batch), result)
    assert "quantized_input_range" not in dict(model.named_buffers())
    quantize_after_fit(model.trainer, tmp_path / "again.pt")
    assert torch.equal(load_quantized(LitTiny(net()), tmp_path / "again.pt").to(model.dtype).net(batch), result)
    written = Path(path).read_bytes()
    fit(QuantizationAwareTraining(), net=net, fast_dev_run=True)
    assert Path(path).read_bytes() == written


def test_parts_that_change_no_result_do_not_change_this_one(fit):
    parts = ActivationCheckpointing(), ActivationOffload("0B"), InPlaceFusion(), EarlyRelease(), OptimizerInBackward()
    ours = fit(QuantizationAwareTraining(), *parts, net=TinyGPT)
    assert_equal_weights(ours, fit(QuantizationAwareTraining(), net=TinyGPT))


@pytest.mark.parametrize(
    ("callbacks", "options", "net"),
    [
        ([lambda: MicroBatching(2)], dict, TinyCNN),
        ([lambda: LowBitOptimizer()], dict, TinyCNN),
        ([ChunkedLoss], dict, TinyGPT),
        ([], lambda: {"plugins": [LeanMixedPrecision("bf16", recast_in_backward=True)]}, TinyCNN),
        ([], lambda: {"strategy": "ddp_fork", "devices": 2}, TinyCNN),
    ],
    ids=["parts", "states", "loss", "recast", "ranks"],
)
def test_others_work_beside_it(callbacks, options, net, fit, tmp_path):
    ours = QuantizationAwareTraining("int4", save=str(tmp_path / "q.pt"))
    model = fit(ours, *(make() for make in callbacks), net=net, **options())
    plain = fit(*(make() for make in callbacks), net=net, **options())
    assert describe_module(model) == describe_module(plain)
    assert differs(model, plain)
    load_quantized(LitTiny(net()), tmp_path / "q.pt")


def test_training_keeps_rounded_weights_and_inputs_and_their_masks_for_the_backward():
    model, batch = torch.nn.Linear(64, 32), torch.randn(8, 64)
    parts = torch.nn.Sequential(model)
    plain = saved_bytes(parts, lambda: parts(batch).sum())
    quantization = apply_fake_quantization(parts)
    quantization.is_on = True
    weight, inputs = 32 * 64, 8 * 64
    # the input, rounded in its place; a mask of a byte per number of what needs a gradient; the rounded weight
    assert plain == 4 * inputs
    assert saved_bytes(parts, lambda: parts(batch).sum()) == 4 * inputs + weight
    batch.requires_grad_()
    assert saved_bytes(parts, lambda: parts(batch).sum()) == 4 * inputs + inputs + 4 * weight + weight


def test_plain_rounded_weights_are_loaded_for_kernels_of_others(fit, tmp_path):
    fit(QuantizationAwareTraining(save=str(tmp_path / "q.pt")))
    stored, plain = (load_quantized(LitTiny(TinyCNN()), tmp_path / "q.pt", as_float=flag) for flag in (False, True))
    levels, scale = stored.net[8].weight_levels, stored.net[8].weight_scale.view(torch.float32)
    assert torch.equal(plain.net[8].weight, levels.float() * scale[:, None])
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(plain, torchao.Int8DynamicActivationInt8WeightConfig())
    assert (plain.net[8].weight.qdata.int() - levels).abs().max() <= 1


def test_a_head_that_shares_the_weight_of_an_embedding_is_left_alone_and_refused_by_name():
    model = ByteGPT(1, 16, 2, 8)
    names = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    assert [*apply_fake_quantization(model).layers] == [name for name in names if name != "net.head"]
    with pytest.raises(
        ValueError,
        match=r"^layers='net\.head' names 'net\.head', which shares its weight with a module that is not quantized: "
        r"name other layers\.$",
    ):
        apply_fake_quantization(model, layers="net.head")
    assert [*apply_fake_quantization(ByteGPT(1, 16, 2, 8, tie_head=False)).layers] == names


def test_a_plain_run_is_quantized_with_or_without_ranges_of_a_calibration_loader(fit, tmp_path):
    trainer = fit(make=TinyDigitsResNet).trainer
    validation, calibration = trainer.val_dataloaders, TinyDigitsResNet().train_dataloader()
    static = quantize_after_fit(trainer, tmp_path / "static.pt", "int8", calibration, validation)
    dynamic = quantize_after_fit(trainer, tmp_path / "dynamic.pt", "int8", None, validation)
    assert static.before == dynamic.before
    assert static.after["val_loss"] != dynamic.after["val_loss"]
    for name, result in (("static", static), ("dynamic", dynamic)):
        assert result.after["val_loss"] == pytest.approx(result.before["val_loss"], rel=0.02)
        loaded = load_quantized(TinyDigitsResNet(), tmp_path / f"{name}.pt")
        assert trainer.validate(loaded, validation, verbose=False)[0] == result.after


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scheme": 8}, TypeError, "(scheme) must be 'int8' or 'int4', got 8 of type int."),
        ({"scheme": "int2"}, ValueError, "(scheme) must be 'int8' or 'int4', got 'int2'."),
        ({"start_epoch": True}, TypeError, "(start_epoch) must be an int, got True of type bool."),
        ({"start_epoch": -1}, ValueError, "(start_epoch) must be at least 0, got -1."),
        ({"save": 1}, TypeError, "(save) must be a path or None, got 1 of type int."),
    ],
    ids=["kind of scheme", "scheme", "kind of epoch", "epoch", "path"],
)
def test_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape('QuantizationAwareTraining' + message)}$"):
        QuantizationAwareTraining(**arguments)


REFUSED = {
    QuantizeFrozenWeights: "which quantizes weights already. Leave one out.",
    TokenTiling: "which would move the range of a layer's inputs with each tile. Leave one out.",
    EMAWeightAveraging: "which copies the module without the ranges of inputs. Leave one out.",
}


@pytest.mark.parametrize("other", REFUSED)
def test_what_cannot_work_is_refused(other, fit):
    message = f"QuantizationAwareTraining does not work with {other.__name__}, {REFUSED[other]}"
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        fit(QuantizationAwareTraining(), other())


def test_sharded_weights_are_refused(fit):
    message = "QuantizationAwareTraining does not work with ForkingOffload: it shards weights. Use 'ddp' or one device."
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        fit(QuantizationAwareTraining(), strategy=ForkingOffload())


def test_a_model_without_layers_and_files_of_others_are_named(fit, tmp_path):
    with pytest.warns(UserWarning, match="^QuantizationAwareTraining does nothing: LitTiny has no linear layer or"):
        fit(QuantizationAwareTraining(), net=Layerless)
    with pytest.raises(ValueError, match=r"^layers='net\.1' names 'net\.1', which has nothing to quantize: it is no"):
        fit(QuantizationAwareTraining(layers="net.1"))
    torch.save({}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"^load_quantized\(path\) must be a file of QuantizationAwareTraining, got"):
        load_quantized(TinyCNN(), tmp_path / "other.pt")
    fit(QuantizationAwareTraining(save=str(tmp_path / "q.pt")))
    with pytest.raises(
        ValueError, match=r"^load_quantized\(module\) must be what was saved: TinyCNN has no layer 'net\.0'\.$"
    ):
        load_quantized(TinyCNN(), tmp_path / "q.pt")
    with pytest.raises(RuntimeError, match=r"^quantize_after_fit\(trainer\) must have fitted a module: call trainer"):
        quantize_after_fit(pl.Trainer(logger=False, accelerator="cpu"), tmp_path / "q.pt")
    for other in (QuantizeFrozenWeights(), EMAWeightAveraging()):
        message = (
            f"quantize_after_fit does not work with {type(other).__name__}, which also changes the module in "
            "validation. Leave one out."
        )
        with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
            quantize_after_fit(pl.Trainer(callbacks=[other], logger=False, accelerator="cpu"), tmp_path / "q.pt")


class Layerless(torch.nn.Module):
    """Logits of images [B, 3, 8, 8], by a bias."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(10))

    def forward(self, images):
        return images.mean((1, 2, 3))[:, None] + self.bias

    samples = TinyCNN.samples
