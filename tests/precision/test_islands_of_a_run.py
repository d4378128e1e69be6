"""Which modules become islands, and which of them are of no use."""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_vram.precision.run import PrecisionRun, Settings
from lightning_vram.techniques.mixed_precision import module_precision


class Head(nn.Module):
    """A head that is called by another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleDict({"l": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x).softmax(-1)

    def logits(self, x: Tensor) -> Tensor:
        return self.h["l"](x)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.MultiheadAttention(4, 2), Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head.logits(self.body(x, x, x)[0])


def names_of(model: Model, modules: list[nn.Module]) -> list[str]:
    names = {module: name.replace("._orig_mod", "") for name, module in model.named_modules()}
    return [names[module] for module in modules]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize(
    ("patterns", "before", "after"),
    [
        (("Head", "**.h.l"), ["head"], ["head"]),
        (("body", nn.Linear), ["body", "head.h.l"], []),
        (("**.out_proj",), ["body.out_proj"], ["body.out_proj"]),
        ((), [], []),
    ],
    ids=str,
)
def test_all_that_match_are_islands_and_those_that_nobody_calls_are_named(
    patterns, before, after, is_compiled, monkeypatch, make_trainer
):
    monkeypatch.setattr(module_precision, "_compiled", set())  # another test may have compiled an island of the class
    model = Model()
    if is_compiled:
        model.head = torch.compile(model.head, backend="eager")
    run = PrecisionRun(model, make_trainer(accelerator="cpu"), Settings(fp32_modules=patterns), is_training=False)
    assert sorted(names_of(model, run._islands.idle)) == sorted(before)
    assert sum("_fp32_island" in vars(part) for part in model.modules()) == len(before)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2, 1, 4))
    assert names_of(model, run._islands.idle) == after
    run.remove()
    assert not any("_fp32_island" in vars(part) for part in model.modules())
