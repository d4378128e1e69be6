"""What each part of a scheme saves and costs, as far as the search has run a step without it."""

from collections.abc import Sequence
from itertools import pairwise

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.measured import Measured
from lightning_vram.planner.scheme import Scheme


def effects(scheme: Scheme, tried: Sequence[Measured]) -> tuple[str, ...]:
    """Say what each part changes beside those before it.

    Args:
        scheme: Of several parts.
        tried: All that was run.

    Returns:
        A sentence for each part; an empty one where the steps with and without it are not both among ``tried``.
    """
    steps = [_find(Scheme(scheme.parts[:number]), tried) for number in range(len(scheme.parts) + 1)]
    return tuple(_sentence(before, after) for before, after in pairwise(steps))


def _find(scheme: Scheme, tried: Sequence[Measured]) -> Measured | None:
    return next((measured for measured in tried if measured.scheme == scheme), None)


def _sentence(before: Measured | None, after: Measured | None) -> str:
    if before is None or after is None:
        return ""
    saved_bytes = before.needed_bytes - after.needed_bytes
    change = f"Saves {format_bytes(saved_bytes)}" if saved_bytes >= 0 else f"Takes {format_bytes(-saved_bytes)} more"
    return f"{change}; a step takes {after.seconds / before.seconds:.2f} times as long."
