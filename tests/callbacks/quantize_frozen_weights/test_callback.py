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
from lightning.pytorch.utilities.model_summary import summarize
from support.helpers import LitTiny, TinyCNN, assert_equal_weights, describe_module
from support.lora_nets import NUM_QUANTIZED, QUANTIZED, LitLoRA, LoRANet
from torch import nn

from lightning_vram import (
    AccumulationScheduler,
    ActivationCheckpointing,
    ActivationCompression,
    ActivationOffload,
    AutoVRAM,
    ChunkedLoss,
    EarlyRelease,
    EmptyCache,
    InPlaceFusion,
    LeakDetector,
    LeanMixedPrecision,
    MemoryBudget,
    MicroBatching,
    MomentsInBF16,
    OptimizerInBackward,
    QuantizeFrozenWeights,
    VRAMMonitor,
    estimate_memory,
    plan_memory,
    track_memory,
)
from lightning_vram.estimation.traced_fit import FitRun, trace_fit, trace_real_fit
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.techniques.quantize_frozen_weights import (
    QuantizedWeight,
    quantize_frozen_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def fit(make_trainer):
    def fit(*callbacks: Any, make: Any = LitLoRA, ckpt_path: Any = None, **options: Any) -> Any:
        pl.seed_everything(0, verbose=False)
        model = make()
        trainer = make_trainer(callbacks=list(callbacks), **{"max_epochs": 1, "limit_val_batches": 0, **options})
        trainer.fit(model, ckpt_path=ckpt_path)
        model.saved_by = trainer
        return model

    return fit


class Saving(pl.Callback):
    """Saves a checkpoint after each epoch, as a run would."""

    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def rounded(bits: int = 8, make: Any = LitLoRA) -> LitLoRA:
    """A plain module that has the decoded weights."""
    model = make()
    quantize_frozen_weights(model, bits).remove()
    return model


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ],
    ids=str,
)
def test_a_run_is_that_of_a_plain_module_with_the_decoded_weights(bits, options, fit):
    assert_equal_weights(fit(QuantizeFrozenWeights(bits), **options), fit(make=partial(rounded, bits), **options))


def lean() -> dict[str, Any]:
    return {"plugins": [LeanMixedPrecision("bf16", recast_in_backward=True)]}


def kept() -> dict[str, Any]:
    return {"plugins": [LeanMixedPrecision("bf16", parameters="bf16+kahan")]}


@pytest.mark.parametrize(
    ("others", "options"),
    [
        ([lambda: ActivationCheckpointing(layers=["net.up", "net.down"])], dict),
        ([lambda: ActivationCheckpointing(layers=["net.up", "net.down"], save="matmuls")], dict),
        ([InPlaceFusion], dict),
        ([partial(ActivationOffload, "0B")], dict),
        ([InPlaceFusion, partial(ActivationOffload, "0B")], lambda: {"precision": "bf16-mixed"}),
        ([], lean),
        ([], kept),
    ],
    ids=["checkpointing", "selective", "fusion", "offload", "fusion, offload, autocast", "recast", "bf16 weights"],
)
def test_other_parts_work_beside_it_to_the_bit(others, options, fit):
    ours = fit(QuantizeFrozenWeights(4), *(make() for make in others), **options())
    theirs = fit(*(make() for make in others), make=partial(rounded, 4), **options())
    assert_equal_weights(ours, theirs)


def test_checkpoints_without_frozen_weights_beside_16_bit_weights(fit, tmp_path):
    quantize = partial(QuantizeFrozenWeights, 4, save="trainable")
    fit(quantize(), Saving(tmp_path / "last.ckpt"), **kept())
    resumed = fit(quantize(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2, **kept())
    assert_equal_weights(resumed, fit(quantize(), max_epochs=2, **kept()))


EXACT = [
    ChunkedLoss,
    partial(MicroBatching, 2),
    EarlyRelease,
    partial(EmptyCache, 2),
    VRAMMonitor,
    MemoryBudget,
    AutoVRAM,
    LeakDetector,
    MomentsInBF16,
    OptimizerInBackward,
    ActivationCompression,
    partial(AccumulationScheduler, by_epoch={0: 2}),
]


@pytest.mark.parametrize("make", EXACT, ids=lambda make: getattr(make, "func", make).__name__)
def test_so_do_parts_that_do_not_look_at_weights(make, fit):
    ours = fit(QuantizeFrozenWeights(4), make())
    assert_equal_weights(ours, fit(make(), make=partial(rounded, 4)))


class Lean(LitLoRA):
    """Leaves out what is frozen by itself, as Lightning documents it."""

    strict_loading = False

    def state_dict(self, **options: Any) -> dict[str, Any]:
        frozen = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        return {name: value for name, value in super().state_dict(**options).items() if name not in frozen}


@pytest.mark.parametrize(
    ("save", "make"), [("all", LitLoRA), ("trainable", LitLoRA), ("all", Lean)], ids=["all", "trainable", "by itself"]
)
def test_a_resumed_run_ends_at_the_same_bits(save, make, fit, tmp_path):
    quantize, fit = partial(QuantizeFrozenWeights, 4, save=save), partial(fit, make=make)
    fit(quantize(), Saving(tmp_path / "last.ckpt"))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    trained = {name for name, parameter in LitLoRA().named_parameters() if parameter.requires_grad}
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    if save == "trainable" or make is Lean:
        assert saved.keys() == trained
    else:
        bytes_of = {name: value.nbytes for name, value in saved.items() if value.dtype is torch.uint8}
        assert bytes_of.keys() == {f"net.{name}.weight" for name in QUANTIZED}
        assert sum(bytes_of.values()) == 0.5625 * NUM_QUANTIZED
    resumed = fit(quantize(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert_equal_weights(resumed, fit(quantize(), max_epochs=2))


def other_weights() -> LitLoRA:
    torch.manual_seed(1)
    return LitLoRA()


@pytest.mark.parametrize("when", ["before", "resumed"])
def test_a_plain_checkpoint_is_loaded_as_if_it_had_been_there(when, fit, tmp_path):
    fit(Saving(tmp_path / "plain.ckpt"), make=other_weights)
    if when == "before":
        make = partial(LitLoRA.load_from_checkpoint, tmp_path / "plain.ckpt")
        ours = fit(QuantizeFrozenWeights(), make=make)
        theirs = fit(make=lambda: round_off(make()))
    else:
        ours = fit(QuantizeFrozenWeights(), ckpt_path=tmp_path / "plain.ckpt", max_epochs=2)
        theirs = fit(ckpt_path=tmp_path / "plain.ckpt", make=LitLoRA, max_epochs=2)
        pairs = zip(ours.net.up.lora_A.parameters(), theirs.net.up.lora_A.parameters(), strict=True)
        assert all(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.99 for a, b in pairs)
        return
    assert_equal_weights(ours, theirs)


def round_off(model):
    quantize_frozen_weights(model, 8).remove()
    return model


def test_evaluation_takes_the_checkpoint_of_a_run(make_trainer, fit, tmp_path):
    model = fit(QuantizeFrozenWeights(4), Saving(tmp_path / "last.ckpt"))
    loss = make_trainer().validate(model, verbose=False)[0]["val_loss"]
    for callback in (QuantizeFrozenWeights(4), QuantizeFrozenWeights(4, keep=True)):
        fresh = LitLoRA()
        trainer = make_trainer(callbacks=[callback])
        assert trainer.validate(fresh, ckpt_path=tmp_path / "last.ckpt", verbose=False)[0]["val_loss"] == loss
        assert isinstance(fresh.net.head.weight, QuantizedWeight) == callback.keep
        if not callback.keep:  # the way to a plain module with the weights of a checkpoint
            assert_equal_weights(fresh, model)


class Fused(LitLoRA):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)  # frozen bytes among them


def test_fused_optimizers_may_have_all_parameters(fit):
    assert_equal_weights(fit(QuantizeFrozenWeights(), make=Fused), fit(make=partial(rounded, 8, Fused)))


def test_kept_weights_stay_quantized_from_run_to_run(make_trainer):
    model = LitLoRA()
    twin = copy.deepcopy(model)
    for keep in (True, False):
        make_trainer(callbacks=[QuantizeFrozenWeights(4, keep=keep)], max_epochs=1).fit(model)
        make_trainer(callbacks=[QuantizeFrozenWeights(4)], max_epochs=1).fit(twin)
        assert isinstance(model.net.head.weight, QuantizedWeight) == keep
    assert_equal_weights(model, twin)


@pytest.mark.parametrize("place", ["training_step", "configure_optimizers"])
def test_a_module_is_what_it_was_but_for_the_error_of_quantization(place, make_trainer):
    model, weights = LitLoRA(), {}
    before = describe_module(model)
    for callbacks in ([QuantizeFrozenWeights()], [QuantizeFrozenWeights()]):
        trainer = make_trainer(callbacks=callbacks)
        trainer.fit(model)
        assert describe_module(model) == before
        assert "load_model_state_dict" not in vars(trainer.strategy)
        weights = weights or {name: value.clone() for name, value in model.state_dict().items() if "lora" not in name}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())  # no further error


class Late(LitLoRA):
    """Is made in ``configure_model``, with or without memory, and frozen there."""

    device_name = "cpu"

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.net, self.num_batches = None, 4

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device(self.device_name):
                self.net = LoRANet()


class OnMeta(Late):
    device_name = "meta"


def test_layers_of_configure_model_are_quantized(fit, tmp_path):
    ours = fit(QuantizeFrozenWeights(), Saving(tmp_path / "last.ckpt"), make=Late)
    assert ours.saved_by.model.net.head.weight.dtype is torch.float32
    assert torch.load(tmp_path / "last.ckpt")["state_dict"]["net.head.weight"].dtype is torch.uint8
    resumed = fit(QuantizeFrozenWeights(), make=Late, ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert_equal_weights(resumed, fit(QuantizeFrozenWeights(), make=Late, max_epochs=2))


class Wide(LitLoRA):
    """Eight frozen layers of 256 KiB under a trained one, without memory until they are loaded."""

    def __init__(self, device: str = "meta") -> None:
        pl.LightningModule.__init__(self)
        with torch.device(device):
            layers = [nn.Linear(256, 256, bias=False).requires_grad_(False) for _ in range(8)]
            self.net = nn.Sequential(nn.Embedding(96, 256).requires_grad_(False), *layers, nn.Linear(256, 96))
        self.num_batches = 2


@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_without_memory_is_never_whole_in_full_precision(bits, make_trainer, monkeypatch, tmp_path):
    monkeypatch.setattr("lightning_vram.techniques.quantize_frozen_weights.packing._PART", 4096)
    full = Wide("cpu")
    trainer = make_trainer(max_steps=0)
    trainer.fit(full)
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    model = Wide()
    trainer = make_trainer(callbacks=[QuantizeFrozenWeights(bits, keep=True)], limit_test_batches=0)
    with track_memory() as tracker:
        trainer.test(model, ckpt_path=tmp_path / "full.ckpt", verbose=False)
    now = sum(parameter.nbytes for parameter in model.parameters())
    whole = sum(parameter.nbytes for parameter in full.parameters())
    assert now < 0.36 * whole
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


@pytest.mark.distributed
def test_two_ranks_are_one(fit):
    options = {"strategy": "ddp_fork", "devices": 2}
    assert_equal_weights(fit(QuantizeFrozenWeights(4), **options), fit(make=partial(rounded, 4), **options))


@pytest.mark.parametrize("bits", [8, 4])
def test_the_estimate_is_that_of_the_run(bits, monkeypatch):
    monkeypatch.setattr("lightning_vram.techniques.quantize_frozen_weights.packing._PART", 4096)  # of up to 16,384
    batch, options = torch.randint(96, (4, 9)), {"callbacks": [QuantizeFrozenWeights(bits)]}
    estimate = estimate_memory(LitLoRA(), batch, device="cpu", trainer=options, find_limits=False)
    real = trace_real_fit(LitLoRA(), batch, FitRun(options))
    assert estimate.peak_bytes == real.stage("train").peak_bytes
    assert estimate.stages["first step"].timeline.peak_bytes == real.stage("first step").peak_bytes  # packing, too
    plain = estimate_memory(LitLoRA(), batch, device="cpu", find_limits=False)
    held, packed = (one.stages["train"].timeline.peak_by_category[Category.PARAMETERS] for one in (plain, estimate))
    assert held - packed == (4 - bits / 8 - 4 / 64) * NUM_QUANTIZED


class Deep(LitLoRA):
    """A frozen MLP of 32 layers, as large as those of a model of 8 B parameters, and a small layer that trains."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        with torch.device("meta"):
            layers = [nn.Linear(*sizes, bias=False) for sizes in 16 * [(4096, 14336), (14336, 4096)]]
            self.net = nn.Sequential(nn.Linear(8, 4096), *(layer.requires_grad_(False) for layer in layers))

    def training_step(self, batch):
        return self.net(batch).sum()


@pytest.mark.parametrize("card", [None, DeviceSpec("rtx4090", 24 * 2**30)])
def test_an_estimate_works_on_one_part_of_each_large_weight(card):
    traced = trace_fit(Deep(), torch.ones(2, 8), FitRun({"callbacks": [QuantizeFrozenWeights(4)]}, card))
    assert len(traced.timeline.allocations) < 32 * 150  # on the host, a weight has 224 parts
    packing = [one.device for one in traced.timeline.allocations if "embedding_bag" in one.op]
    assert set(packing) == {"cpu" if card is None else "lazy:0"}
    assert len(packing) == 32 * 4  # four results each


def test_a_plan_needs_what_the_estimate_needs():
    run = {"device": "rtx4090", "trainer": {"callbacks": [QuantizeFrozenWeights(4)], "precision": "bf16-mixed"}}
    estimate = estimate_memory(Deep(), torch.ones(2, 8), find_limits=False, **run)
    plan = plan_memory(Deep(), torch.ones(2, 8), **run)
    assert plan.peak_bytes == estimate.needed_bytes  # weights are decoded to float32 after the last step


@pytest.mark.parametrize("bits", [8, 4])
def test_chunked_loss_takes_a_quantized_head(bits, fit, caplog):
    chunked = fit(QuantizeFrozenWeights(bits), ChunkedLoss(heads="net.head", chunk=4))
    assert "needs all logits" not in caplog.text
    whole = fit(QuantizeFrozenWeights(bits))
    for one, other in zip(chunked.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


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
    assert_equal_weights(fit(QuantizeFrozenWeights(), make=Reading), fit(make=partial(rounded, 8, Reading)))
    message = (
        "the weight of 'net.embed' is quantized to 8 bits, and 'clamp_' would change it: call "
        "dequantize_frozen_weights(model) first, or exclude the layer with layers=."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        fit(QuantizeFrozenWeights(), make=Writing)


class Counting(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        summary = summarize(pl_module)
        self.counted = (summary.total_parameters, summary.trainable_parameters, summary.model_size)


def test_a_summary_counts_what_it_counts_without(fit):
    counts = [Counting(), Counting()]
    fit(QuantizeFrozenWeights(4), counts[0])
    fit(counts[1])
    assert counts[0].counted == counts[1].counted


def test_checkpoints_that_do_not_fit_are_named(fit, tmp_path):
    fit(QuantizeFrozenWeights(4, block_size=32), Saving(tmp_path / "last.ckpt"))
    message = (
        r"size mismatch for net.embed.weight: .*quantized with bits=8, block_size=64. A quantized checkpoint needs"
    )
    with pytest.raises(RuntimeError, match=message):
        fit(QuantizeFrozenWeights(), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    with pytest.raises(RuntimeError, match=r"size mismatch for net\.embed\.weight"):
        fit(QuantizeFrozenWeights(4, ["net.head"], 32), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"callbacks": [QuantizeFrozenWeights(), QuantizeFrozenWeights()]},
            "Two QuantizeFrozenWeights in one Trainer: leave one out.",
        ),
        (
            {"callbacks": [QuantizeFrozenWeights(), BackboneFinetuning()]},
            "QuantizeFrozenWeights does not work with BackboneFinetuning, which unfreezes layers: a quantized weight "
            "cannot be trained. Leave one out.",
        ),
        (
            {"callbacks": [QuantizeFrozenWeights(), EMAWeightAveraging()]},
            "QuantizeFrozenWeights does not work with EMAWeightAveraging, which cannot average quantized weights. "
            "Leave one out.",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, message, make_trainer):
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        make_trainer(**options).fit(LitLoRA())
