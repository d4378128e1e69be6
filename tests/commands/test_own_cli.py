"""The user's own LightningCLI, which imports ``lightning_vram``: short names, and lists that add to those of others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from support.parts import ROOT

import lightning_vram

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
OWN = {"trainer": {"callbacks": [{"class_path": "ModelSummary"}], "logger": False, "accelerator": "cpu"}}


def make(*arguments: str) -> LightningCLI:
    Path("own.yaml").write_text(yaml.safe_dump(OWN))
    return LightningCLI(BoringModel, BoringDataModule, run=False, args=["--config=own.yaml", *arguments])


def names(cli: LightningCLI) -> list[str]:
    return [type(callback).__name__ for callback in cli.trainer.callbacks]


def test_short_names_of_a_file_add_to_the_callbacks_of_another():
    callbacks = [
        {"class_path": "AutoVRAM", "init_args": {"budget": "1GiB", "allow": "lossless"}},
        {"class_path": "VRAMMonitor"},
    ]
    Path("memory.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": callbacks}}))
    cli = make("--config=memory.yaml")
    found = names(cli)
    assert [name for name in found if name in ("ModelSummary", "AutoVRAM", "VRAMMonitor")] == [
        *("ModelSummary", "AutoVRAM", "VRAMMonitor")
    ]
    (auto,) = (callback for callback in cli.trainer.callbacks if isinstance(callback, lightning_vram.AutoVRAM))
    assert (auto.budget, auto.allow) == ("1GiB", "lossless")


def test_short_names_on_the_command_line():
    found = names(make("--trainer.callbacks+=MicroBatching", "--trainer.callbacks.size=2"))
    assert {"ModelSummary", "MicroBatching"} <= {*found}


@pytest.mark.slow
def test_the_command_knows_names_where_no_file_names_the_package():
    """A process of its own: others have imported everything."""
    demo = "lightning.pytorch.demos.boring_classes"
    command = [sys.executable, "-m", "lightning_vram", "fit", f"--model={demo}.BoringModel"]
    command += [f"--data={demo}.BoringDataModule", "--trainer.logger=false", "--trainer.fast_dev_run=true"]
    command += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=fsdp_offload"]
    command += ["--trainer.callbacks+=AutoVRAM", "--trainer.callbacks.budget=1GiB"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
