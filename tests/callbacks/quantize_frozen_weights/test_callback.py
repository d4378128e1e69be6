"""``QuantizeFrozenWeights``: whole runs, their checkpoints, what it refuses, and how it leaves a module."""

import copy
import re
import sys
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitTiny, TinyCNN, assert_equal_weights
from support.lora_nets import NUM_QUANTIZED, QUANTIZED, LitLoRA, LoRANet, Saving
from torch import nn

from lightning_vram import (
    ActivationCheckpointing,
    ActivationOffload,
    ChunkedLoss,
    InPlaceFusion,
    LeanMixedPrecision,
    MicroBatching,
    MomentsInBF16,
    OptimizerInBackward,
    QuantizeFrozenWeights,
    estimate_memory,
    track_memory,
)
from lightning_vram.estimation.traced_fit import FitRun, trace_real_fit
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.techniques.quantize_frozen_weights import QuantizedWeight, quantize_frozen_weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def rounded(bits: int = 8, make: Any = LitLoRA) -> LitLoRA:
    """A plain module that has the decoded weights."""
    model = make()
    quantize_frozen_weights(model, bits).remove()
    return model


def kept() -> dict[str, Any]:
    return {"plugins": [LeanMixedPrecision("bf16", parameters="bf16+kahan")]}


MODES = {
    "clipping": (8, [], lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "bf16": (4, [], lambda: {"precision": "bf16-true"}),
    "selective": (4, [lambda: ActivationCheckpointing(["net.up", "net.down"], save="matmuls")], dict),
    "fusion": (4, [InPlaceFusion, partial(ActivationOffload, "0B")], lambda: {"precision": "bf16-mixed"}),
    "recast": (4, [], lambda: {"plugins": [LeanMixedPrecision("bf16", recast_in_backward=True)]}),
    "16-bit weights": (4, [], kept),
    "in backward": (4, [OptimizerInBackward], dict),
    "micro-batches": (4, [partial(MicroBatching, 2)], dict),
    "moments": (4, [MomentsInBF16], dict),
    "ranks": (4, [], lambda: {"strategy": "ddp_fork", "devices": 2}),
}


@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_that_of_a_plain_module_with_the_decoded_weights(mode, fit):
    bits, others, options = MODES[mode]
    ours = fit(LitLoRA, QuantizeFrozenWeights(bits), *(make() for make in others), **options())
    assert_equal_weights(ours, fit(partial(rounded, bits), *(make() for make in others), **options()))


@pytest.mark.parametrize(("save", "options"), [("all", dict), ("trainable", kept)], ids=["all", "trainable"])
def test_a_resumed_run_ends_at_the_same_bits(save, options, fit, tmp_path):
    quantize, path = partial(QuantizeFrozenWeights, 4, save=save), tmp_path / "last.ckpt"
    fit(LitLoRA, quantize(), Saving(path), **options())
    saved = torch.load(path, weights_only=True)["state_dict"]
    trained = {name for name, parameter in LitLoRA().named_parameters() if parameter.requires_grad}
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    if save == "trainable":
        assert saved.keys() == trained
    else:
        bytes_of = {name: value.nbytes for name, value in saved.items() if value.dtype is torch.uint8}
        assert bytes_of.keys() == {f"net.{name}.weight" for name in QUANTIZED}
        assert sum(bytes_of.values()) == 0.5625 * NUM_QUANTIZED
    resumed = fit(LitLoRA, quantize(), ckpt_path=path, max_epochs=2, **options())
    assert_equal_weights(resumed, fit(LitLoRA, quantize(), max_epochs=2, **options()))


def test_a_plain_checkpoint_is_resumed_with_rounded_weights(fit, tmp_path):
    path = tmp_path / "plain.ckpt"
    fit(LitLoRA, Saving(path))
    ours = fit(LitLoRA, QuantizeFrozenWeights(), ckpt_path=path, max_epochs=2)
    theirs = fit(LitLoRA, ckpt_path=path, max_epochs=2)
    pairs = zip(ours.net.up.lora_A.parameters(), theirs.net.up.lora_A.parameters(), strict=True)
    assert all(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99 for a, b in pairs)


def test_evaluation_takes_the_checkpoint_of_a_run(make_trainer, fit, tmp_path):
    model = fit(LitLoRA, QuantizeFrozenWeights(4), Saving(tmp_path / "last.ckpt"))
    loss = make_trainer().validate(model, verbose=False)[0]["val_loss"]
    for callback in (QuantizeFrozenWeights(4), QuantizeFrozenWeights(4, keep=True)):
        fresh = LitLoRA()
        trainer = make_trainer(callbacks=[callback])
        assert trainer.validate(fresh, ckpt_path=tmp_path / "last.ckpt", verbose=False)[0]["val_loss"] == loss
        assert isinstance(fresh.net.head.weight, QuantizedWeight) == callback.keep
        if not callback.keep:  # the way to a plain module with the weights of a checkpoint
            assert_equal_weights(fresh, model)


def test_kept_weights_stay_quantized_from_run_to_run(make_trainer):
    model = LitLoRA()
    twin = copy.deepcopy(model)
    for keep in (True, False):
        make_trainer(callbacks=[QuantizeFrozenWeights(4, keep=keep)], max_epochs=1).fit(model)
        make_trainer(callbacks=[QuantizeFrozenWeights(4)], max_epochs=1).fit(twin)
        assert isinstance(model.net.head.weight, QuantizedWeight) == keep
    assert_equal_weights(model, twin)


class Late(LitLoRA):
    """Is made in ``configure_model``."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.net, self.num_batches = None, 4

    def configure_model(self) -> None:
        if self.net is None:
            self.net = LoRANet()


def test_layers_of_configure_model_are_quantized(fit, tmp_path):
    path = tmp_path / "last.ckpt"
    ours = fit(Late, QuantizeFrozenWeights(), Saving(path))
    assert ours.net.head.weight.dtype is torch.float32
    assert torch.load(path)["state_dict"]["net.head.weight"].dtype is torch.uint8
    resumed = fit(Late, QuantizeFrozenWeights(), ckpt_path=path, max_epochs=2)
    assert_equal_weights(resumed, fit(Late, QuantizeFrozenWeights(), max_epochs=2))


class Wide(LitLoRA):
    """Eight frozen layers of 256 KiB under a trained one, without memory until they are loaded."""

    def __init__(self, device: str = "meta") -> None:
        pl.LightningModule.__init__(self)
        with torch.device(device):
            layers = [nn.Linear(256, 256, bias=False).requires_grad_(False) for _ in range(8)]
            self.net = nn.Sequential(nn.Embedding(96, 256).requires_grad_(False), *layers, nn.Linear(256, 96))
        self.num_batches = 2


def test_a_model_without_memory_is_never_whole_in_full_precision(make_trainer, monkeypatch, tmp_path):
    monkeypatch.setattr("lightning_vram.techniques.quantize_frozen_weights.packing._PART", 4096)
    full = Wide("cpu")
    trainer = make_trainer(max_steps=0)
    trainer.fit(full)
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    model = Wide()
    trainer = make_trainer(callbacks=[QuantizeFrozenWeights(4, keep=True)], limit_test_batches=0)
    with track_memory() as tracker:
        trainer.test(model, ckpt_path=tmp_path / "full.ckpt", verbose=False)
    now = sum(parameter.nbytes for parameter in model.parameters())
    whole = sum(parameter.nbytes for parameter in full.parameters())
    assert now < 0.23 * whole
    in_file = whole  # torch.load of Lightning reads all of it
    assert tracker.timeline.peak_bytes <= in_file + now + 4 * 256 * 256 + 8 * 4 * 4096
    expected = LitLoRA.state_dict(full)
    for name, value in model.state_dict().items():
        if value.dtype is torch.float32:
            assert torch.equal(value, expected[name])


def test_it_says_what_it_saves_and_that_it_does_nothing(make_trainer, caplog):
    with caplog.at_level("INFO"):
        make_trainer(callbacks=[QuantizeFrozenWeights(4)], max_steps=1).fit(LitLoRA())
    assert "QuantizeFrozenWeights keeps 5 frozen weights in 4 bits: 31.50 KiB instead of 224.00 KiB." in caplog.text
    message = (
        "QuantizeFrozenWeights does nothing: LitTiny has no frozen Linear, Conv or Embedding with 4096 weights or "
        "more. Freeze with requires_grad_(False) in __init__, setup or configure_model."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        make_trainer(callbacks=[QuantizeFrozenWeights()], max_steps=1).fit(LitTiny(TinyCNN()))


def test_the_estimate_is_that_of_the_run(monkeypatch):
    monkeypatch.setattr("lightning_vram.techniques.quantize_frozen_weights.packing._PART", 4096)  # of up to 16,384
    batch, options = torch.randint(96, (4, 9)), {"callbacks": [QuantizeFrozenWeights(4)]}
    estimate = estimate_memory(LitLoRA(), batch, device="cpu", trainer=options, find_limits=False)
    real = trace_real_fit(LitLoRA(), batch, FitRun(options))
    assert estimate.peak_bytes == real.stage("train").peak_bytes
    assert estimate.stages["first step"].timeline.peak_bytes == real.stage("first step").peak_bytes  # packing, too
    plain = estimate_memory(LitLoRA(), batch, device="cpu", find_limits=False)
    held, packed = (one.stages["train"].timeline.peak_by_category[Category.PARAMETERS] for one in (plain, estimate))
    assert held - packed == (4 - 4 / 8 - 4 / 64) * NUM_QUANTIZED


def test_chunked_loss_takes_a_quantized_head(fit, caplog):
    chunked = fit(LitLoRA, QuantizeFrozenWeights(4), ChunkedLoss(heads="net.head", chunk=4))
    assert "needs all logits" not in caplog.text
    torch.testing.assert_close(chunked.state_dict(), fit(LitLoRA, QuantizeFrozenWeights(4)).state_dict())


class Reading(LitLoRA):
    """Reads weights elsewhere than in their layers, as a penalty does."""

    def training_step(self, batch):
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().training_step(batch) + 1e-3 * penalty + (torch.ones(64) @ self.net.head.weight.T).sum()


class Writing(LitLoRA):
    def on_train_batch_end(self, *_):
        for parameter in self.parameters():
            parameter.data.clamp_(-0.1, 0.1)


def test_code_of_the_module_reads_decoded_weights_and_cannot_change_them(fit):
    assert_equal_weights(fit(Reading, QuantizeFrozenWeights()), fit(partial(rounded, 8, Reading)))
    message = (
        "the weight of 'net.embed' is quantized to 8 bits, and 'clamp_' would change it: call "
        "dequantize_frozen_weights(model) first, or exclude the layer with layers=."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        fit(Writing, QuantizeFrozenWeights())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"bits": "4"}, TypeError, "(bits) must be 8 or 4, got '4' of type str."),
        ({"bits": 2}, ValueError, "(bits) must be 8 or 4, got 2."),
        ({"block_size": 48}, ValueError, "(block_size) must be a power of two from 16 to 4096, got 48."),
        ({"block_size": True}, ValueError, "(block_size) must be a power of two from 16 to 4096, got True."),
        ({"save": "adapters"}, ValueError, "(save) must be 'all' or 'trainable', got 'adapters'."),
        ({"keep": 1}, TypeError, "(keep) must be True or False, got 1 of type int."),
        ({"library": "bnb"}, ValueError, "(library) must be 'auto', 'own' or 'bitsandbytes', got 'bnb'."),
        (
            {"library": "bitsandbytes", "block_size": 16},
            ValueError,
            "(library='bitsandbytes') needs block_size=32 or more, got 16.",
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, kind, message):
    with pytest.raises(kind, match=f"^{re.escape('QuantizeFrozenWeights' + message)}$"):
        QuantizeFrozenWeights(**arguments)


def test_a_library_that_is_missing_is_named(monkeypatch, make_trainer):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModuleNotFoundError, match="bitsandbytes"):
        make_trainer(callbacks=[QuantizeFrozenWeights(library="bitsandbytes")]).fit(LitLoRA())


REFUSED = {
    QuantizeFrozenWeights: "Two QuantizeFrozenWeights in one Trainer: leave one out.",
    BackboneFinetuning: "QuantizeFrozenWeights does not work with BackboneFinetuning, which unfreezes layers: a "
    "quantized weight cannot be trained. Leave one out.",
    EMAWeightAveraging: "QuantizeFrozenWeights does not work with EMAWeightAveraging, which cannot average quantized "
    "weights. Leave one out.",
}


@pytest.mark.parametrize("other", REFUSED)
def test_what_does_not_go_together_is_refused(other, fit):
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(REFUSED[other])}$"):
        fit(LitLoRA, QuantizeFrozenWeights(), other())
