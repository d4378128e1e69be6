"""ActivationCheckpointing: when it applies, what it says, what it refuses."""

import pytest
import torch
from helpers import LateTiny, LitTiny, TinyCNN, TinyGPT, assert_equal_weights, describe_module
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_vram import ActivationCheckpointing
from lightning_vram.techniques.checkpointing import _STATE, apply_activation_checkpointing


class Spy(Callback):
    """Looks which modules are checkpointed while batches run."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def _look(self, stage: str, pl_module: nn.Module) -> None:
        self.names[stage] = [name for name, module in pl_module.named_modules() if _STATE in vars(module)]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._look("train", pl_module)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self._look("test", pl_module)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["net.blocks.0", "net.blocks.1"]),
        ({"every_n_layers": 2}, ["net.blocks.0"]),
        ({"layers": "net.blocks.1"}, ["net.blocks.1"]),
        ({"layers": ["TransformerEncoderLayer", "net.head"]}, ["net.blocks.0", "net.blocks.1", "net.head"]),
        ({"layers": nn.TransformerEncoderLayer}, ["net.blocks.0", "net.blocks.1"]),
    ],
)
def test_checkpoints_what_is_asked_for_while_fitting_only(arguments, expected, make_trainer):
    spy, model = Spy(), LitTiny(TinyGPT())
    trainer = make_trainer(callbacks=[ActivationCheckpointing(**arguments), spy])
    trainer.fit(model)
    trainer.test(model)
    assert spy.names == {"train": expected, "test": []}


def test_finds_layers_made_in_configure_model(make_trainer):
    spy = Spy()
    make_trainer(callbacks=[ActivationCheckpointing(), spy]).fit(LateTiny())
    assert spy.names["train"] == ["net.blocks.0", "net.blocks.1"]


def test_says_what_it_recomputes(make_trainer, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_vram.callbacks.activation_checkpointing.rank_zero_info", said.append)
    layers = ["net.blocks.*", "**.linear1"]
    make_trainer(callbacks=[ActivationCheckpointing(layers)]).fit(LitTiny(TinyGPT()))
    assert said == [
        "ActivationCheckpointing recomputes 2 layers in backward: net.blocks.0 ... net.blocks.1. "
        "2 more matches lie inside them and are left out, net.blocks.0.linear1 first."
    ]


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (
            LitTiny(TinyGPT()),
            "net.blok.*",
            r"^ActivationCheckpointing: layers='net\.blok\.\*' matches no module or class of LitTiny\. Close",
        ),
        (
            LitTiny(nn.Sequential(nn.Linear(3, 3))),
            "auto",
            r"^ActivationCheckpointing: layers='auto' finds no candidate in LitTiny: .* modules are 'net', 'net\.0'\.$",
        ),
    ],
)
def test_refuses_what_it_cannot_find_and_changes_nothing(model, layers, message, make_trainer):
    model.train_dataloader = model.val_dataloader = lambda: [torch.zeros(1)]
    before = describe_module(model)
    trainer = make_trainer(callbacks=[ActivationCheckpointing(layers)])
    with pytest.raises(MisconfigurationException, match=message):
        trainer.fit(model)
    assert describe_module(model) == before
    assert "setup" not in vars(trainer.strategy)


def test_two_on_the_same_layers_are_refused_and_both_undone(make_trainer):
    model = LitTiny(TinyGPT())
    before = describe_module(model)
    trainer = make_trainer(callbacks=[ActivationCheckpointing(), ActivationCheckpointing("net.blocks.0")])
    with pytest.raises(MisconfigurationException, match="checkpointed already"):
        trainer.fit(model)
    assert describe_module(model) == before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every_n_layers": 0}, ValueError, r"^ActivationCheckpointing\(every_n_layers\) must be at least 1, got 0\.$"),
        ({"every_n_layers": 1.5}, TypeError, r"^ActivationCheckpointing\(every_n_layers\) must be an int, got 1\.5 of"),
        (
            {"layers": []},
            ValueError,
            r"^ActivationCheckpointing\(layers\) must name at least one layer, got \[\]\. 'auto'",
        ),
        (
            {"layers": ""},
            ValueError,
            r"^ActivationCheckpointing\(layers\) must name at least one layer, got ''\. 'auto'",
        ),
        (
            {"layers": None},
            TypeError,
            r"^ActivationCheckpointing\(layers\) must be 'auto', .*, got None of type NoneType",
        ),
        ({"layers": ["a", 3]}, TypeError, r"^ActivationCheckpointing\(layers\) must be .*, got 3 of type int\.$"),
        ({"layers": int}, TypeError, r"^ActivationCheckpointing\(layers\) must be .* of type type\.$"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        ActivationCheckpointing(**arguments)


def test_resumes_from_a_checkpoint_of_either_kind(make_trainer, tmp_path):
    def fit(callbacks, ckpt_path=None, max_epochs=2):
        torch.manual_seed(0)
        model = LitTiny(TinyCNN())
        trainer = make_trainer(callbacks=callbacks, max_epochs=max_epochs)
        trainer.fit(model, ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
        return trainer, model

    trainer, _ = fit([ActivationCheckpointing()], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "packed.ckpt")
    trainer, _ = fit([], max_epochs=1)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    _, from_packed = fit([], tmp_path / "packed.ckpt")
    _, from_plain = fit([ActivationCheckpointing()], tmp_path / "plain.ckpt")
    assert_equal_weights(from_packed, from_plain)


def test_weight_averaging_sees_the_same_weights(make_trainer):
    averages = []
    for callbacks in ([], [ActivationCheckpointing()]):
        torch.manual_seed(0)
        model = LitTiny(TinyCNN())
        make_trainer(callbacks=[*callbacks, WeightAveraging(use_buffers=True)], limit_val_batches=0).fit(model)
        averages.append(model)
    assert_equal_weights(*averages)


@pytest.mark.gpu
@pytest.mark.parametrize("net", [TinyCNN, TinyGPT])
def test_training_is_unchanged_on_a_gpu(net, make_trainer):
    fitted = []
    for callbacks in ([], [ActivationCheckpointing()]):
        torch.manual_seed(0)
        model = LitTiny(net())
        make_trainer(accelerator="gpu", devices=1, callbacks=callbacks, deterministic=True).fit(model)
        fitted.append(model.cpu())
    assert_equal_weights(*fitted)


class ByKeyword(nn.Module):
    """Gets its tensors inside a dict: torch's checkpoint would not find the device to keep random numbers of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, *, state: dict) -> torch.Tensor:
        return self.down(nn.functional.dropout(self.up(state["hidden"]), 0.5))


@pytest.mark.gpu
def test_dropout_masks_are_the_same_on_a_gpu_when_tensors_come_by_keyword():
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        net = nn.ModuleList([ByKeyword(), ByKeyword()]).cuda()
        if checkpoint:
            apply_activation_checkpointing(net)
        hidden = torch.randn(8, 16, device="cuda")
        for layer in net:
            hidden = layer(state={"hidden": hidden})
        hidden.sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
