"""Which layers are found, chosen and refused."""

import pytest
import torch
from support.helpers import LitTiny, TinyCNN, TinyGPT
from torch import nn
from torchmetrics import MeanSquaredError, MetricCollection

from lightning_vram.core.layers import find_conv_stages, select_layers, thin_out
from lightning_vram.demos import ByteGPT, DigitsResNet


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.norm = nn.LayerNorm(4)


class SpecialBlock(Block):
    pass


BLOCKS = [f"blocks.{i}" for i in range(4)]
AUTO = ["blocks.0", "blocks.1", "blocks.2.heads.0", "blocks.2.heads.1", "blocks.3"]  # the odd one is searched inside


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block(), SpecialBlock(), Block()])
        self.metrics = MetricCollection({"a": MeanSquaredError(), "b": MeanSquaredError(squared=False)})


def names(model: nn.Module, layers="auto", every_n_layers: int = 1) -> list[str]:
    return [layer.name for layer in thin_out(select_layers(model, layers), every_n_layers).layers]


def stage(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 3, 1), *layers)


def declare(model: nn.Module, *classes: str) -> nn.Module:
    model._no_split_modules = list(classes)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(Net(), AUTO, id="outermost list, one class"),
        pytest.param(declare(Net(), "SpecialBlock"), ["blocks.2"], id="what the model declares comes first"),
        pytest.param(declare(Net(), "Unknown"), AUTO, id="declared but not there"),
        pytest.param(LitTiny(TinyGPT()), ["net.blocks.0", "net.blocks.1"], id="transformer"),
        pytest.param(LitTiny(TinyCNN()), ["net[0:3]", "net[3:7]"], id="conv stages"),
        pytest.param(TinyCNN(), ["[0:3]", "[3:7]"], id="conv stages of the root"),
        pytest.param(ByteGPT(num_layers=3, width=8), [f"net.blocks.{i}" for i in range(3)], id="ByteGPT"),
        pytest.param(
            DigitsResNet((2, 1)), ["net.stages.0.0", "net.stages.0.1", "net.stages.1"], id="sequentials of sequentials"
        ),
        pytest.param(nn.ModuleDict({"a": Block(), "b": Block()}), ["a", "b"], id="blocks in a dict"),
        pytest.param(
            nn.Sequential(stage(nn.ReLU()), stage(nn.ReLU())), ["0", "1"], id="repeated small sequentials are blocks"
        ),
    ],
)
def test_auto(model, expected):
    assert names(model) == expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("blocks.*", BLOCKS),
        ("blocks.[02]", ["blocks.0", "blocks.2"]),
        ("**.norm", [f"blocks.{i}.norm" for i in range(4)]),
        ("SpecialBlock", ["blocks.2"]),
        ("Block", BLOCKS),  # subclasses are blocks too
        (Block, BLOCKS),
        (f"{__name__}.SpecialBlock", ["blocks.2"]),
        ("torch.nn.modules.normalization.LayerNorm", [f"blocks.{i}.norm" for i in range(4)]),
        ("blocks", BLOCKS),  # a list has no forward: its children
        (["stem", SpecialBlock], ["stem", "blocks.2"]),
        (("blocks.3", "blocks.0"), ["blocks.0", "blocks.3"]),  # the model's order
    ],
)
def test_patterns(layers, expected):
    assert names(Net(), layers) == expected


def test_every_nth():
    assert names(Net(), "blocks.*", 3) == ["blocks.0", "blocks.3"]
    assert names(Net(), "auto", 2) == AUTO[::2]
    assert names(Net(), "auto", 9) == ["blocks.0"]


def test_the_outermost_of_nested_matches_is_chosen_and_the_others_are_told():
    selection = select_layers(Net(), ["SpecialBlock", "**.norm"])
    assert [layer.name for layer in selection.layers] == ["blocks.0.norm", "blocks.1.norm", "blocks.2", "blocks.3.norm"]
    assert selection.nested == ("blocks.2.norm",)


def test_compiled_modules_are_found_under_their_own_name_and_once():
    net = Net()
    net.blocks[1] = torch.compile(net.blocks[1], backend="eager")
    selection = select_layers(net, "blocks.1")
    assert selection.layers[0].module is net.blocks[1]._orig_mod
    assert names(net) == AUTO
    net.same = net.blocks[0]
    net.compiled = torch.compile(net.blocks[3], backend="eager")
    assert names(net, "Block") == BLOCKS


def test_a_single_operation_is_no_candidate():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(
        ValueError, match=r"^layers='auto' finds no candidate in Sequential: .* modules are '0', '1', '2'\.$"
    ):
        names(model)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            "net.blok.*",
            r"^layers='net\.blok\.\*' matches no module or class of LitTiny\. Close names: 'net\.blocks\.\*'",
        ),
        ("TransformerEncoder", r"no module or class of LitTiny\. Close names: 'TransformerEncoderLayer'\.$"),
        ("*.norm", r"^layers='\*\.norm' matches no module or class"),  # one star is one name
        (nn.LSTM, r"^layers=torch\.nn\.modules\.rnn\.LSTM matches no module of LitTiny\. "),
        (["net.head", "zzz"], r"^layers='zzz' .* It has 'net', .* and the classes 'Dropout', "),
    ],
)
def test_a_pattern_that_matches_nothing_lists_what_is_close(layers, message):
    with pytest.raises(ValueError, match=message):
        names(LitTiny(TinyGPT()), layers)


@pytest.mark.parametrize(
    ("model", "stages"),
    [
        (stage(nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten()), [(0, 5)]),
        (stage(nn.GroupNorm(1, 3), nn.SiLU(), nn.Conv2d(3, 3, 1)), [(0, 3)]),
        (stage(nn.ReLU()), []),  # no norm
        (stage(nn.BatchNorm2d(3)), []),  # no activation
        (nn.ModuleList([nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()]), []),  # no forward
    ],
)
def test_conv_stages(model, stages):
    assert list(find_conv_stages(model)) == stages
