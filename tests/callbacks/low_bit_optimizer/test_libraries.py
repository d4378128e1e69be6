"""``LowBitOptimizer(library=...)``: kernels of torchao and bitsandbytes, and plain checkpoints."""

import re
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pytorch_optimizer import Lion
from support.helpers import assert_equal_weights
from support.host_layers import ADAMW, Layers
from support.offload_nets import leave_group
from torch import Tensor
from torch.optim import SGD, Adam, NAdam
from torch.optim.lr_scheduler import OneCycleLR

from lightning_vram import LowBitOptimizer
from lightning_vram.core.tensors.codecs import MappedTensor
from lightning_vram.optimizers import low_precision
from lightning_vram.optimizers.moment_forms import FORMS

pytestmark = pytest.mark.filterwarnings("ignore")
SGD_MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
CASES = [  # library, bits, optimizer, moments of it
    ("torchao", 8, ADAMW, 2),
    ("torchao", 4, partial(Adam, lr=1e-2, weight_decay=0.01), 2),
    ("bitsandbytes", 8, ADAMW, 2),
    ("bitsandbytes", 8, SGD_MOMENTUM, 1),
    ("bitsandbytes", 8, partial(Lion, lr=1e-3), 1),
]
IDS = ["torchao 8", "torchao 4", "bitsandbytes", "bitsandbytes SGD", "bitsandbytes Lion"]


class Looking(Layers):
    """Notes the bytes of its states, and which are a library's; weights are a number of blocks."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, num_batches=6)
        self.net[2] = torch.nn.Linear(400, 32)
        self.net[4] = torch.nn.Linear(32, 4)

    def on_train_batch_end(self, *unused: Any) -> None:
        values = [one for state in self.trainer.optimizers[0].state.values() for one in state.values()]
        self.num_theirs = sum(isinstance(one, MappedTensor) for one in values)
        self.num_bytes = sum(one.nbytes for one in values if isinstance(one, MappedTensor))


@pytest.fixture
def fit(make_trainer):
    def fit(optimizer: Any, bits: Any, library: Any, *, ckpt_path: Any = None, max_epochs: int = 2) -> Any:
        pl.seed_everything(0, verbose=False)
        model, callbacks = Looking(optimizer), [] if bits is None else [LowBitOptimizer(bits, library)]
        trainer = make_trainer(callbacks=callbacks, max_epochs=max_epochs)
        trainer.fit(model, ckpt_path=ckpt_path)
        model.saved_by = trainer
        return model

    return fit


@pytest.mark.parametrize(("library", "bits", "optimizer", "num_moments"), CASES, ids=IDS)
def test_a_library_steps_and_its_checkpoints_are_plain(library, bits, optimizer, num_moments, fit, tmp_path):
    pytest.importorskip(library)
    whole, plain = fit(optimizer, bits, library), fit(optimizer, None, None)
    ours, theirs = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (whole, plain))
    assert 0 < (ours - theirs).norm() < {8: 0.02, 4: 0.25}[bits] * theirs.norm()
    size = 256 if bits == 8 else 128
    assert whole.num_theirs == 2 * num_moments
    assert whole.num_bytes == num_moments * (16 * 400 + 400 * 32) * (bits // 4 / 2 + 4 / size)
    half = fit(optimizer, bits, library, max_epochs=1)
    half.saved_by.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"].values()
    assert {type(value) for state in saved for value in state.values() if value is not None} == {Tensor}
    assert_equal_weights(fit(optimizer, bits, library, ckpt_path=tmp_path / "last.ckpt"), whole)
    for other in (None, 8):  # any other setting loads it
        fit(optimizer, other, "own", ckpt_path=tmp_path / "last.ckpt")
    fit(optimizer, 8, "own", max_epochs=1).saved_by.save_checkpoint(tmp_path / "own.ckpt")
    fit(optimizer, bits, library, ckpt_path=tmp_path / "own.ckpt")


def test_auto_is_our_own_on_a_host(fit):
    assert fit(ADAMW, 8, "auto").num_theirs == 0


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, "bnb"), "LowBitOptimizer(library) must be one of 'auto', 'own', 'torchao', 'bitsandbytes', got 'bnb'."),
        (
            (4, "bitsandbytes"),
            "LowBitOptimizer(library='bitsandbytes') supports 8 bits only, got bits=4: use bits=8, or "
            "library='own' or 'torchao'.",
        ),
    ],
)
def test_other_libraries_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LowBitOptimizer(*arguments)


def test_a_library_that_is_missing_is_named(monkeypatch, make_trainer):
    monkeypatch.setattr(low_precision, "find_spec", lambda name: None)
    message = "LowBitOptimizer(library='torchao') needs torchao: pip install torchao."
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(message)}$"):
        make_trainer(callbacks=[LowBitOptimizer(library="torchao")]).fit(Layers(num_batches=1))


def cycled(parameters: Any) -> Any:
    optimizer = ADAMW(parameters)
    OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    return optimizer


@pytest.mark.parametrize(
    ("library", "optimizer", "what"),
    [
        ("torchao", SGD_MOMENTUM, "SGD"),
        ("torchao", partial(Lion, lr=1e-3), "Lion"),
        ("torchao", partial(ADAMW, fused=True), "AdamW(fused=True)"),
        ("torchao", cycled, "AdamW whose betas a schedule moves, as each value would be compiled"),
        ("bitsandbytes", NAdam, "NAdam"),
        ("bitsandbytes", partial(Adam, weight_decay=0.1), "Adam(weight_decay=0.1)"),
        ("torchao", partial(ADAMW, amsgrad=True), "AdamW(amsgrad=True)"),
    ],
    ids=["SGD", "Lion", "fused", "schedule", "NAdam", "weight decay", "amsgrad"],
)
def test_what_a_library_cannot_step_is_refused(library, optimizer, what, monkeypatch, make_trainer):
    monkeypatch.setattr(low_precision, "find_spec", lambda name: name)
    message = f"LowBitOptimizer(library={library!r}) cannot step {what}: use library='own'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_trainer(callbacks=[LowBitOptimizer(library=library)]).fit(Layers(optimizer, num_batches=1))


def test_under_fsdp_offload_a_library_is_refused(monkeypatch, make_trainer):
    monkeypatch.setattr(low_precision, "find_spec", lambda name: name)
    trainer = make_trainer(callbacks=[LowBitOptimizer(library="torchao")], strategy="fsdp_offload", devices=1)
    message = (
        "LowBitOptimizer(library='torchao') does not work with FSDPOffloadStrategy, which steps on the host: use "
        "library='own'."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        trainer.fit(Layers(num_batches=1))
    leave_group()


@pytest.mark.parametrize(
    ("installed", "bits", "optimizer", "chosen"),
    [
        (["torchao", "bitsandbytes"], 8, ADAMW, "bitsandbytes"),
        (["torchao", "bitsandbytes"], 4, ADAMW, "torchao"),
        (["torchao"], 8, ADAMW, "torchao"),
        (["torchao", "bitsandbytes"], 8, partial(ADAMW, fused=True), "own"),
        (["bitsandbytes"], 4, ADAMW, "own"),
        ([], 8, ADAMW, "own"),
    ],
    ids=["both", "4 bits", "torchao", "fused", "4 bits by bitsandbytes", "none"],
)
def test_on_cuda_auto_is_what_is_installed_and_can(installed, bits, optimizer, chosen, monkeypatch):
    class OnCuda(torch.nn.Parameter):
        device = torch.device("cuda")

    monkeypatch.setattr(low_precision, "find_spec", lambda name: name if name in installed else None)
    one = optimizer([torch.nn.Parameter(torch.ones(2))])
    monkeypatch.setattr(low_precision, "iterate_parameters", lambda optimizer: [OnCuda(torch.ones(2))])
    form = low_precision.form_of("auto", FORMS[f"{bits}bit"], one)
    assert getattr(form, "library", "own") == chosen
    assert form.bits == bits
