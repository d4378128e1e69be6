"""The four models on README.md's first screen: its rows are those of the program that it names."""

import json

import pytest
from support.pages import README, figures_hold
from support.parts import ROOT

from tests.benchmarks.real_models import MODELS, as_row, measure

ROWS = json.loads((ROOT / "tests" / "benchmarks" / "real_models.json").read_text())["rows"]


@pytest.mark.parametrize("name", MODELS)
def test_the_readme_has_the_row_of_the_file(name):
    assert as_row(name, ROWS[name]) in README.read_text().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.skipif(not figures_hold(), reason="figures are of the pinned torch")
@pytest.mark.parametrize("name", MODELS)
def test_the_program_still_finds_the_row(name):
    pytest.importorskip("monai" if name == "unet-3d" else "peft")
    assert measure(name) == ROWS[name]
