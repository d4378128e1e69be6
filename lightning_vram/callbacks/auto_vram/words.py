"""What ``AutoVRAM`` says."""

from collections.abc import Sequence

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.measured import Found
from lightning_vram.planner.miss import Ways
from lightning_vram.planner.parts import Exactness
from lightning_vram.planner.words import summary, ways_out, where

NAME = "AutoVRAM"


def found_message(found: Found, budget_bytes: int, device: str) -> str:
    """Say what is done, and what else was tried."""
    plain, best = found.plain, found.taken
    needed, budget = format_bytes(plain.needed_bytes), format_bytes(budget_bytes)
    if best is plain:
        return f"{NAME}: the run fits as it is. A step needs {needed} of the {budget} on {device}. Nothing is changed."
    return (
        f"{NAME}: a step needs {needed}, and there are {budget} on "
        f"{device}. With {best.scheme} it needs {format_bytes(best.needed_bytes)}, in about "
        f"{best.seconds / plain.seconds:.2f} times the time. Needed memory and time of what was tried:\n"
        f"{summary(found, budget_bytes)}"
    )


def largest_line(num_batches: int, shape: Sequence[int]) -> str:
    """Say what a run is planned for whose batches differ."""
    return f"Planned for the largest of the first {num_batches} batches, {list(shape)}."


def larger_line(shape: Sequence[int]) -> str:
    """Say that there is a larger one."""
    return (
        f"{NAME}: a batch, {list(shape)}, is larger than the one that the run was planned for. It may need more memory."
    )


def miss_message(found: Found, budget_bytes: int, device: str, level: Exactness, ways: Ways, *, goes_on: bool) -> str:
    """Say that nothing fits, and what would help."""
    least = found.least
    fate = " The run goes on with it, and will probably run out of memory." if goes_on else ""
    return (
        f"{NAME}: nothing fits {format_bytes(budget_bytes)} on {device}. The least is "
        f"{format_bytes(least.needed_bytes)}, with {least.scheme}{where(least)}.{fate} {ways_out(least, level, ways)}"
    )


def unknown_line(reason: str, *, can_run_again: bool) -> str:
    """Say that there is no plan, and that nothing is changed."""
    later = ", with checkpointed layers once memory has run out" if can_run_again else ""
    return f"{NAME} cannot plan this run: {reason}. The run goes on as it is{later}."


def fallback_lines(reason: str, done: Sequence[str]) -> str:
    """Say that there is no plan, and what is done instead."""
    return f"{NAME} cannot plan this run: {reason}.\nThe run goes on without a plan: {', '.join(done)}."


def weights_message(reason: str, weights_bytes: int, budget_bytes: int) -> str:
    """Say that not even the weights fit."""
    return (
        f"{NAME}: nothing fits {format_bytes(budget_bytes)}, the weights alone are {format_bytes(weights_bytes)}. Give "
        f"a larger budget, or use strategy='fsdp_offload'. The step could not be traced: {reason}."
    )


def correction_line(seconds: float, reserved_bytes: int, budget_bytes: int, scheme: object | None) -> str:
    """Say what the first steps took, and what changes."""
    end = "The plan stays." if scheme is None else f"From now on with {scheme}."
    return (
        f"{NAME}: a step takes {seconds * 1e3:.1f} ms, with {format_bytes(reserved_bytes)} of the "
        f"{format_bytes(budget_bytes)} reserved. {end}"
    )


def tighter_line(scheme: object) -> str:
    """Say that the plan was not enough."""
    return f"{NAME}: memory ran out in spite of the plan. The step runs again with {scheme}."


def relief_note(level: Exactness) -> str:
    """For an error that no plan helps against."""
    if level == Exactness.EXACT:
        return f"{NAME}: no tighter plan is left. With allow='lossless' the batch would run in parts."
    return f"{NAME}: no tighter plan is left."
