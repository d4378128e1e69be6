"""The four models on README.md's first screen: its rows are those of the program that it names."""

import json
import re

import lightning.pytorch as pl
import pytest
import torch
from support.pages import README, figures_hold
from support.parts import ROOT
from torch.utils._pytree import tree_map

import lightning_vram
from lightning_vram import estimate_memory
from tests.benchmarks.real_models import DEVICE, MODELS, as_row, measure

ROWS = json.loads((ROOT / "tests" / "benchmarks" / "real_models.json").read_text())["rows"]


@pytest.mark.parametrize("name", MODELS)
def test_the_readme_has_the_row_of_the_file(name):
    assert as_row(name, ROWS[name]) in README.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.skipif(not figures_hold(), reason="figures are of the pinned torch")
# a plan for the other takes minutes, with any torch
@pytest.mark.parametrize("name", [pytest.param("llama-8b-lora", marks=pytest.mark.minutes), "resnet-50", "unet-3d"])
def test_the_program_still_finds_the_row(name):
    pytest.importorskip("monai" if name == "unet-3d" else "peft")
    assert measure(name) == ROWS[name]


def callbacks_of(features: str) -> list[pl.Callback]:
    """Make them of a row's text: ``ActivationCheckpointing(budget=6.22GiB, remedies=recompute+offload)``."""
    found = []
    for name, arguments in re.findall(r"(\w+)(?:\((.*?)\))?(?: \+ |$)", features):
        pairs = [argument.split("=") for argument in arguments.split(", ") if argument]
        values = {key: value.split("+") if "+" in value else value for key, value in pairs}
        found.append(getattr(lightning_vram, name)(**values))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not figures_hold(), reason="figures are of the pinned torch")
def test_a_step_with_the_features_of_the_other_row_needs_its_memory():
    model, row = MODELS["llama-1b"], ROWS["llama-1b"]
    with torch.device("meta"):
        module, shapes = model.make()
    batch = tree_map(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), shapes)
    for callbacks, expected in (([], "baseline_bytes"), (callbacks_of(row["features"]), "peak_bytes")):
        trainer = {**model.trainer, "callbacks": callbacks}
        estimate = estimate_memory(module, batch, device=DEVICE, trainer=trainer, find_limits=False)
        assert estimate.needed_bytes == pytest.approx(row[expected], rel=0.002)  # the text rounds the arguments
