"""Foreign code that predicts after it has trained: what every part leaves behind is the plain module."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign_code import programs
from foreign_code.runs import Program, make_trainer
from torch.utils._pytree import tree_leaves

from lightning_vram import (
    ActivationCheckpointing,
    ActivationOffload,
    EmptyCache,
    InPlaceFusion,
    LeanMixedPrecision,
    MicroBatching,
    VRAMMonitor,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:ActivationOffload"),  # from host memory to host memory
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),  # Lightning, of any strategy with ranks
]

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ActivationCheckpointing": lambda: {"callbacks": [ActivationCheckpointing()]},
    "ActivationOffload": lambda: {"callbacks": [ActivationOffload(min_offload_bytes=256)]},
    "InPlaceFusion": lambda: {"callbacks": [InPlaceFusion(min_bytes=64)]},
    "MicroBatching": lambda: {"callbacks": [MicroBatching(eval="auto")]},
    "VRAMMonitor": lambda: {"callbacks": [VRAMMonitor(track=True, path=None), EmptyCache(1)]},
    "fsdp_offload": lambda: {"strategy": "fsdp_offload"},
}


def predict(make_program: Program, callbacks: list[pl.Callback] | None = None, **arguments: Any) -> list[Any]:
    trainer = make_trainer(*(callbacks or []), max_epochs=1, **arguments)
    pl.seed_everything(0, verbose=False)
    program = make_program()
    trainer.fit(program)
    pl.seed_everything(1, verbose=False)
    return tree_leaves(trainer.predict(program))


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("program", [programs.Images, programs.Detection, programs.Diffusion])
@pytest.mark.parametrize("part", PARTS)
def test_predictions_are_those_of_the_plain_run(program, part):
    expected, actual = predict(program), predict(program, **PARTS[part]())
    assert len(actual) == len(expected) > 0
    assert all(map(torch.equal, actual, expected))


def test_predictions_in_bf16_are_those_of_lightning():
    expected = predict(programs.Images, precision="bf16-mixed")
    actual = predict(programs.Images, plugins=[LeanMixedPrecision("bf16")])
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("program", [programs.Images, programs.Detection])
def test_predictions_of_parts_of_a_batch_are_put_together(program):
    expected, actual = predict(program), predict(program, [MicroBatching(4, eval=2)])
    assert len(actual) == len(expected) > 0
    for ours, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
