"""``LowBitOptimizer(library=...)``: kernels of torchao and bitsandbytes, and plain checkpoints."""

import re
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import assert_equal_weights
from support.host_layers import ADAMW, Layers
from support.offload_nets import leave_group
from torch import Tensor
from torch.optim import SGD, Adam, NAdam
from torch.optim.lr_scheduler import OneCycleLR

from lightning_vram import LowBitOptimizer
from lightning_vram.optimizers import library_moments
from lightning_vram.optimizers.library_moments import CodeMap, MappedTensor

pytestmark = pytest.mark.filterwarnings("ignore")
SGD_MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
CASES = [  # library, bits, optimizer
    ("torchao", 8, ADAMW),
    ("torchao", 4, partial(Adam, lr=1e-2, weight_decay=0.01)),
    ("bitsandbytes", 8, ADAMW),
]
IDS = ["torchao 8", "torchao 4", "bitsandbytes"]


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


class FakeBitsandbytes(ModuleType):
    """Its functions that we call, in operators: they run anywhere, on our memory and in the order of its arguments."""

    def create_dynamic_map(self, *, signed: bool) -> Tensor:
        roots = torch.linspace(-127 / 128 if signed else 1 / 256, 1, 256)
        return roots * roots.abs()

    def optimizer_update_8bit_blockwise(self, *arguments: Any) -> None:
        _, gradient, weights, *records = arguments[:5]
        beta1, beta2, _, _, eps, step, lr = arguments[5:12]
        maps, scales, decay = arguments[12:14], arguments[14:16], arguments[16]
        pieces = zip(records, scales, maps, strict=True)
        first, second = (MappedTensor(*one[:2], one[0].shape, CodeMap(one[2], 256)) for one in pieces)
        weights.mul_(1 - lr * decay)
        first.copy_(first.decode().lerp(gradient, 1 - beta1))
        second.copy_(second.decode().lerp(gradient**2, 1 - beta2))
        divisors = (second.decode() / (1 - beta2**step)).sqrt() + eps
        weights.addcdiv_(first.decode(), divisors, value=-lr / (1 - beta1**step))


def check_steps_and_checkpoints(fit: Any, library: Any, bits: int, optimizer: Any, path: Any) -> None:
    def train(bits: Any, library: Any, **options: Any) -> Any:
        callbacks = [] if bits is None else [LowBitOptimizer(bits, library)]
        return fit(partial(Looking, optimizer), *callbacks, **{"max_epochs": 2, **options})

    whole, plain = train(bits, library), train(None, None)
    ours, theirs = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (whole, plain))
    assert 0 < (ours - theirs).norm() < {8: 0.02, 4: 0.25}[bits] * theirs.norm()
    size = 256 if bits == 8 else 128
    assert whole.num_theirs == 2 * 2
    assert whole.num_bytes == 2 * (16 * 400 + 400 * 32) * (bits // 4 / 2 + 4 / size)
    train(bits, library, max_epochs=1).trainer.save_checkpoint(path / "last.ckpt")
    saved = torch.load(path / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"].values()
    assert {type(value) for state in saved for value in state.values() if value is not None} == {Tensor}
    assert_equal_weights(train(bits, library, ckpt_path=path / "last.ckpt"), whole)
    for other in (None, 8):  # any other setting loads it
        train(other, "own", ckpt_path=path / "last.ckpt")
    train(8, "own", max_epochs=1).trainer.save_checkpoint(path / "own.ckpt")
    train(bits, library, ckpt_path=path / "own.ckpt")


@pytest.mark.device
@pytest.mark.gpu
@pytest.mark.parametrize(("library", "bits", "optimizer"), CASES, ids=IDS)
def test_a_library_steps_and_its_checkpoints_are_plain(library, bits, optimizer, fit, tmp_path):
    pytest.importorskip(library)
    on_gpu = partial(fit, accelerator="gpu", devices=1)
    check_steps_and_checkpoints(on_gpu, library, bits, optimizer, tmp_path)


def test_a_kernel_steps_moments_in_its_own_form(fit, monkeypatch, tmp_path):
    fake = FakeBitsandbytes("bitsandbytes.functional")
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", fake)
    monkeypatch.setattr(library_moments, "find_spec", lambda name: name)
    monkeypatch.setattr(library_moments.LibraryForm, "why_not", lambda self, optimizer: None)  # for a CPU
    library_moments._map_of.cache_clear()
    check_steps_and_checkpoints(fit, "bitsandbytes", 8, ADAMW, tmp_path)
    library_moments._map_of.cache_clear()


def test_auto_is_our_own_on_a_host(fit, monkeypatch):
    monkeypatch.setattr(library_moments, "find_spec", lambda name: name)
    assert fit(partial(Looking, ADAMW), LowBitOptimizer(8, "auto")).num_theirs == 0


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, "bnb"), "LowBitOptimizer(library) must be 'auto', 'own', 'torchao' or 'bitsandbytes', got 'bnb'."),
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
    monkeypatch.setattr(library_moments, "find_spec", lambda name: None)
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
        ("torchao", partial(ADAMW, fused=True), "AdamW(fused=True)"),
        ("torchao", cycled, "AdamW whose betas a schedule moves, as each value would be compiled"),
        ("bitsandbytes", NAdam, "NAdam"),
        ("torchao", ADAMW, "parameters on cpu, only on CUDA"),
    ],
    ids=["SGD", "fused", "schedule", "NAdam", "CPU"],
)
def test_what_a_library_cannot_step_is_refused(library, optimizer, what, monkeypatch, make_trainer):
    monkeypatch.setattr(library_moments, "find_spec", lambda name: name)
    message = f"LowBitOptimizer(library={library!r}) cannot step {what}: use library='own' or 'auto'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_trainer(callbacks=[LowBitOptimizer(library=library)]).fit(Layers(optimizer, num_batches=1))


def test_under_fsdp_offload_a_library_is_refused(monkeypatch, make_trainer):
    monkeypatch.setattr(library_moments, "find_spec", lambda name: name)
    trainer = make_trainer(callbacks=[LowBitOptimizer(library="torchao")], strategy="fsdp_offload", devices=1)
    message = (
        "LowBitOptimizer(library='torchao') does not work with FSDPOffloadStrategy, which steps on the host: use "
        "library='own'."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        trainer.fit(Layers(num_batches=1))
    leave_group()
