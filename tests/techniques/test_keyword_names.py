"""A layer may call its arguments what this package calls its own."""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lightning_vram
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import parse_save
from lightning_vram.techniques.mixed_precision.module_precision import Float32Islands, keep_norms_low

NAMES = ["module", "state", "plain", "norm", "layer", "save", "function", "debug"]
CHANGES = {
    "checkpointing": apply_activation_checkpointing,
    "fp32": lambda net: Float32Islands(list(net), "cpu"),
    "low norms": lambda net: keep_norms_low(net, "cpu"),
}
PACKAGE = Path(lightning_vram.__file__).parent


class ScaledLayerNorm(nn.Module):
    """A cell and a norm in one, so that every technique takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, **scales: Tensor) -> Tensor:
        for scale in scales.values():
            hidden = hidden * scale
        return self.up(hidden)


class Cells(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([ScaledLayerNorm(), ScaledLayerNorm()])

    def forward(self, hidden: Tensor, scale: Tensor) -> Tensor:
        for cell in self:
            hidden = cell(hidden, **dict.fromkeys(NAMES, scale))
        return hidden


@pytest.fixture(autouse=True)
def draw_the_same_weights():
    torch.manual_seed(0)


def compute_gradients(net: nn.Module, scale: Tensor) -> list[Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(torch.ones(2, 4), scale).float().sum()
    return list(torch.autograd.grad(loss, [*net.parameters(), scale]))


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_gets_every_keyword_that_it_has(name):
    net, scale = Cells(), torch.tensor(1.5, requires_grad=True)
    expected = compute_gradients(net, scale)
    CHANGES[name](net)
    for gradient, plain in zip(compute_gradients(net, scale), expected, strict=True):
        tolerance = 0 if name == "checkpointing" else 0.05  # the others compute in another precision
        assert (gradient - plain).norm() <= tolerance * plain.norm()


def test_a_checkpointed_layer_gets_them_in_compiled_code_as_well():
    net, scale = Cells(), torch.tensor(1.5, requires_grad=True)
    expected = compute_gradients(net, scale)
    apply_activation_checkpointing(net, save=parse_save("matmuls", "save"))
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for gradient, plain in zip(compute_gradients(compiled, scale), expected, strict=True):
        assert torch.equal(gradient, plain)


def find_open_names(path: Path) -> list[str]:
    """Functions that pass on the keywords of a layer, and have names of their own that one of them may have."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef) or node.args.vararg is None or node.args.kwarg is None:
            continue
        names = [argument.arg for argument in [*node.args.args, *node.args.kwonlyargs] if argument.arg != "self"]
        if names:
            found.append(f"{path.relative_to(PACKAGE)}: {node.name}({', '.join(names)})")
    return found


def test_whoever_passes_on_keywords_takes_its_own_arguments_by_position():
    paths = sorted(path for room in ("core", "techniques") for path in (PACKAGE / room).rglob("*.py"))
    assert len(paths) > 60
    assert [name for path in paths for name in find_open_names(path)] == []
