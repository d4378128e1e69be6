"""What a search has found, in lines of text: for logs, which have no tables."""

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.parts import LEVELS, Exactness
from lightning_vram.planner.search import Found, Measured, as_text, unit_of

_MOST_ROWS = 8


def summary(found: Found, budget_bytes: int) -> str:
    """Return a line for each way that was tried and is worth a look, what is taken first.

    Args:
        found: By the search.
        budget_bytes: What there was.
    """
    rows = [_row(one, found.plain) for one in _worth_a_look(found, budget_bytes)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {needed:>{widths[0]}}  {ratio:>{widths[1]}}  {scheme}" for needed, ratio, scheme in rows]
    return "\n".join(lines)


def ways_out(least: Measured, budget_bytes: int, level: Exactness) -> str:
    """Say what would help where nothing fits.

    Args:
        least: What came nearest.
        budget_bytes: What there is.
        level: What results might be.
    """
    ways = [f"budget='{as_text(least.needed_bytes + unit_of(least.needed_bytes) - 1)}'"]
    if least.needed_bytes - least.activation_bytes > budget_bytes:
        ways += ["strategy='fsdp_offload', which keeps weights and states of optimizers on the host", "more devices"]
    else:
        ways += ["a smaller batch with accumulate_grad_batches", "a shorter sequence"]
    names = [repr(name) for name, other in LEVELS.items() if other > level]
    if names:
        ways.append(f"allow={' or '.join(names)}")
    return f"What helps: {', '.join(ways[:-1])}, or {ways[-1]}."


def _worth_a_look(found: Found, budget_bytes: int) -> list[Measured]:
    """What is taken, the run as it is, and what no other beats: first those that fit."""
    shown = {id(one): one for one in (found.best, found.plain) if one is not None}
    for one in sorted(found.unbeaten, key=lambda one: (one.needed_bytes > budget_bytes, one.seconds)):
        shown.setdefault(id(one), one)
    return list(shown.values())[:_MOST_ROWS]


def _row(one: Measured, plain: Measured) -> tuple[str, str, str]:
    return format_bytes(one.needed_bytes), f"{one.seconds / plain.seconds:.2f}x", str(one.scheme)
