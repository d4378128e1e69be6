"""Foreign training code that is stopped and goes on from a checkpoint, with a part before, after, or both."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from foreign_code import programs
from foreign_code.runs import Program, Result, assert_same, make_trainer, read_result
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_vram import ActivationCheckpointing, InPlaceFusion, LeanMixedPrecision, MicroBatching, VRAMMonitor

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),  # the same for both runs
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # of callbacks that are gone
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),  # Lightning, of any strategy with ranks
]

PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ActivationCheckpointing": lambda: {"callbacks": [ActivationCheckpointing()]},
    "InPlaceFusion": lambda: {"callbacks": [InPlaceFusion(min_bytes=64)]},
    "MicroBatching": lambda: {"callbacks": [MicroBatching()]},
    "VRAMMonitor": lambda: {"callbacks": [VRAMMonitor(track=True, path=None)]},
    "fsdp_offload": lambda: {"strategy": "fsdp_offload"},
}


def fit_in_two_runs(make_program: Program, folder: Path, first: dict[str, Any], second: dict[str, Any]) -> Result:
    """An epoch, a checkpoint, and another epoch in a new process' stead: a new trainer and a new module."""
    for max_epochs, arguments in ((1, first), (2, second)):
        others = {name: value for name, value in arguments.items() if name != "callbacks"}
        saver = ModelCheckpoint(dirpath=folder, save_last=True)
        trainer = make_trainer(
            saver, *arguments.get("callbacks", []), max_epochs=max_epochs, enable_checkpointing=True, **others
        )
        pl.seed_everything(max_epochs, verbose=False)
        program = make_program()
        trainer.fit(program, ckpt_path=folder / "last.ckpt" if max_epochs == 2 else None)
    return read_result(trainer, program)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Program], Result]:
    """Make the run once for each program."""
    return cache(lambda make_program: fit_in_two_runs(make_program, tmp_path_factory.mktemp("plain"), {}, {}))


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("program", [programs.Images, programs.TwoTasks])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_weights_and_logs_are_those_of_a_plain_run_that_resumes(program, part, when, plain, tmp_path):
    first = PARTS[part]() if when in ("before", "both") else {}
    second = PARTS[part]() if when in ("after", "both") else {}
    assert_same(fit_in_two_runs(program, tmp_path, first, second), plain(program))


def test_a_bf16_run_resumes_as_lightnings(tmp_path):
    lightnings = {"precision": "bf16-mixed"}
    expected = fit_in_two_runs(programs.Images, tmp_path / "lightning", lightnings, lightnings)
    ours = [{"plugins": [LeanMixedPrecision("bf16")]} for _ in range(2)]
    assert_same(fit_in_two_runs(programs.Images, tmp_path / "ours", *ours), expected)
    mixed = fit_in_two_runs(programs.Images, tmp_path / "mixed", lightnings, {"plugins": [LeanMixedPrecision("bf16")]})
    assert_same(mixed, expected)
