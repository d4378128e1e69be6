"""Schemes as arguments of a Trainer, and as a file."""

from dataclasses import replace

import lightning.pytorch as pl
import pytest
import yaml

from lightning_vram import ActivationCheckpointing, EmptyCache, FSDPOffloadStrategy
from lightning_vram.planner.remedies import remedies_for
from lightning_vram.planner.scheme import ARGUMENT_NOTES, Exactness, Part, Scheme

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
      offload: optimizer  # optimizer: its state is on the host; params: weights, too, which saves more and copies more
  callbacks+:
    # Saves much. At a price.
    - class_path: lightning_vram.ActivationCheckpointing
      init_args:
        budget: 1GiB  # for saved activations on the device: a larger budget recomputes less
        layers: auto
    - class_path: lightning_vram.MicroBatching
      init_args:
        size: 2  # samples at once: fewer need less memory and more time
"""


def test_the_file_says_what_each_part_does_and_what_is_known_of_it():
    text = (Scheme((STRATEGY, CHECKPOINTING)) + PARTS).to_yaml(("", "At a price."))
    assert text == FILE
    assert Scheme((CHECKPOINTING,)).to_yaml().splitlines()[2] == "    # Saves much."
    assert Scheme((PLUGIN,)).to_yaml().splitlines()[1:] == ["  plugins+:", f"    - class_path: {PLUGIN.class_path}"]
    assert yaml.safe_load(Scheme().to_yaml()) == {"trainer": {}}


@pytest.mark.parametrize(
    "value",
    [
        "yes",
        "null",
        "a: b",
        "# x",
        "12:30",
        "0x1F",
        "",
        "two\nlines",
        "*",
        "'",
        None,
        True,
        3,
        1e-5,
        ["a", 1],
        {"a": [1]},
    ],
)
def test_values_are_read_as_they_were(value):
    for place in ("callbacks", "strategy"):
        text = Scheme((Part("a.B", {"budget": value, "second": 2}, place=place, note="n"),)).to_yaml(("s",))
        (found,) = yaml.safe_load(text)["trainer"].values()
        part = found if place == "strategy" else found[0]
        assert part == {"class_path": "a.B", "init_args": {"budget": value, "second": 2}}


def test_each_argument_that_a_plan_may_give_has_a_note():
    found = remedies_for({"precision": "bf16-mixed"}, Exactness.ANY, on_card=True, knows_host=True)
    parts = [*found.singles, *found.free, *(part for states in found.states for part in states.parts)]
    given = {name for part in parts for name in part.init_args} | {"budget", "remedies", "offload_bytes", "size"}
    assert given == set(ARGUMENT_NOTES)
    value = {name: ["recompute", "offload"] if name == "remedies" else 1 for name in given}
    lines = Scheme((Part("a.B", value),)).to_yaml().splitlines()
    arguments = [line for line in lines[lines.index("      init_args:") + 1 :] if ":" in line]
    assert sorted(line.partition("  # ")[2] for line in arguments) == sorted(ARGUMENT_NOTES.values())
    assert yaml.safe_load("\n".join(lines))["trainer"]["callbacks+"][0]["init_args"] == value


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
