"""Schemes as arguments of a Trainer, and as a file."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import yaml

from lightning_vram import ActivationCheckpointing, EmptyCache, FSDPOffloadStrategy
from lightning_vram.planner.scheme import Exactness, Part, Scheme

CHECKPOINTING = Part("lightning_vram.ActivationCheckpointing", {"budget": "1GiB", "layers": "auto"}, note="saves much")
STRATEGY = Part("lightning_vram.FSDPOffloadStrategy", {"offload": "optimizer"}, place="strategy")
PLUGIN = Part("lightning_vram.LeanMixedPrecision", place="plugins")
PARTS = Part("lightning_vram.MicroBatching", {"size": 2}, exactness=Exactness.LOSSLESS)


def test_parts_are_added_to_the_users_own():
    own = EmptyCache()
    arguments = Scheme((STRATEGY, CHECKPOINTING)).trainer_kwargs({"callbacks": own, "precision": "32-true"})
    assert arguments["precision"] == "32-true"
    assert arguments["callbacks"][0] is own
    assert isinstance(arguments["callbacks"][1], ActivationCheckpointing)
    assert isinstance(arguments["strategy"], FSDPOffloadStrategy)
    assert Scheme().trainer_kwargs({"callbacks": None}) == {"callbacks": None}


def test_a_scheme_is_as_exact_as_its_least_exact_part():
    assert Scheme().exactness is Exactness.EXACT
    assert (Scheme((CHECKPOINTING,)) + PARTS).exactness is Exactness.LOSSLESS


FILE = """\
trainer:
  strategy:
    class_path: lightning_vram.FSDPOffloadStrategy
    init_args:
      offload: optimizer
  callbacks+:
    # Saves much.
    - class_path: lightning_vram.ActivationCheckpointing
      init_args:
        budget: 1GiB
        layers: auto
    - class_path: lightning_vram.MicroBatching
      init_args:
        size: 2
"""


def test_the_file_says_what_each_part_does():
    text = (Scheme((STRATEGY, CHECKPOINTING)) + PARTS).to_yaml()
    assert text == FILE
    assert Scheme((CHECKPOINTING,)).to_yaml().splitlines()[2] == "    # Saves much."
    assert Scheme((PLUGIN,)).to_yaml().splitlines()[1:] == ["  plugins+:", f"    - class_path: {PLUGIN.class_path}"]
    assert yaml.safe_load(Scheme().to_yaml()) == {"trainer": {}}


@pytest.mark.parametrize(
    "value",
    ["yes", "null", "a: b", "# x", "12:30", "", "two\nlines", "*", None, True, 3, 1e-5, ["a", 1], {"a": [1]}],
)
def test_values_are_read_as_they_were(value):
    for place in ("callbacks", "strategy"):
        text = Scheme((Part("a.B", {"budget": value, "second": 2}, place=place, note="n"),)).to_yaml()
        (found,) = yaml.safe_load(text)["trainer"].values()
        part = found if place == "strategy" else found[0]
        assert part == {"class_path": "a.B", "init_args": {"budget": value, "second": 2}}


def test_code_can_be_pasted():
    lean = replace(PLUGIN, init_args={"precision": "bf16"}, replaces=("precision",))
    scheme = Scheme((Part("lightning_vram.ActivationCheckpointing"), PARTS))
    assert scheme.to_code() == "callbacks=[ActivationCheckpointing(), MicroBatching(size=2)]"
    assert Scheme((lean,)).to_code() == "precision=None, plugins=[LeanMixedPrecision(precision='bf16')]"
    assert Scheme((STRATEGY,)).to_code() == "strategy=FSDPOffloadStrategy(offload='optimizer')"


def test_names_are_short():
    assert str(Scheme((STRATEGY,)) + Part("lightning_vram.InPlaceFusion")) == (
        "FSDPOffloadStrategy(offload=optimizer) + InPlaceFusion"
    )
    part = Part("lightning_vram.ActivationCheckpointing", {"budget": "1GiB", "remedies": ["recompute", "offload"]})
    assert str(part) == "ActivationCheckpointing(budget=1GiB, remedies=recompute+offload)"
    part = Part("lightning_vram.LeanMixedPrecision", {"precision": "bf16", "recast_in_backward": True, "a": False})
    assert str(part) == "LeanMixedPrecision(precision=bf16, recast_in_backward, a=False)"
    assert str(Scheme()) == "baseline"


def test_what_a_part_takes_the_place_of_is_taken_out():
    scheme = Scheme((replace(PLUGIN, replaces=("precision",)),))
    assert scheme.to_yaml().splitlines()[:3] == [
        "trainer:",
        "  precision: null  # replaced by LeanMixedPrecision",
        "  plugins+:",
    ]
    assert list(scheme.trainer_kwargs({"precision": "bf16-mixed", "devices": 1})) == ["devices", "plugins"]


def test_a_trainer_takes_it():
    arguments = Scheme((CHECKPOINTING,)).trainer_kwargs({})
    assert pl.Trainer(logger=False, accelerator="cpu", **arguments).callbacks
