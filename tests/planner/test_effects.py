"""What is said of each part: the difference to a step without it, where both were run."""

from support.plans import plan_of

from lightning_vram.estimation.step_time import StepTime
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.planner.plan import effects
from lightning_vram.planner.scheme import Measured, Part, Scheme

FUSION, OFFLOAD, CHECKPOINTING = (Part(f"lightning_vram.{name}") for name in ("Fusion", "Offload", "Checkpointing"))


def measured(*parts, needed_bytes, seconds) -> Measured:
    return Measured(Scheme(parts), needed_bytes, 0, StepTime(seconds))


def test_a_part_is_held_against_those_before_it():
    tried = [
        measured(needed_bytes=12 * GIB, seconds=2.0),
        measured(FUSION, needed_bytes=9 * GIB, seconds=2.5),
        measured(CHECKPOINTING, needed_bytes=GIB, seconds=9.0),
        measured(FUSION, CHECKPOINTING, needed_bytes=9 * GIB + 20 * MIB, seconds=2.25),
    ]
    assert effects(Scheme((FUSION, CHECKPOINTING)), tried) == (
        "Saves 3.00 GiB; a step takes 1.25 times as long.",
        "Needs 20.00 MiB more; a step takes 0.90 times as long.",
    )
    assert effects(Scheme(), tried) == ()


def test_nothing_is_said_where_one_of_the_two_was_not_run():
    tried = [
        measured(needed_bytes=4 * GIB, seconds=1.0),
        measured(FUSION, OFFLOAD, needed_bytes=2 * GIB, seconds=1.0),
        measured(FUSION, OFFLOAD, CHECKPOINTING, needed_bytes=GIB, seconds=1.5),
    ]
    assert effects(tried[-1].scheme, tried) == ("", "", "Saves 1.00 GiB; a step takes 1.50 times as long.")


def test_the_file_of_a_plan_says_them():
    assert (
        "    # Recomputes layers in the backward. Saves 960.00 MiB; a step takes 1.05 times as long."
        in plan_of().to_yaml()
    )
