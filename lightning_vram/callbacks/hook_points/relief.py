"""What another callback can do when memory runs out in a step, before the batch is cut."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Relief:
    """Asked by whoever runs a batch again that ran out of memory.

    Args:
        make_room: Makes the step need less, on all ranks alike; ``False`` if it cannot. Called between two tries, when
            nothing of the first is left.
        may_cut: Whether the batch may then run in parts.
        note: For the error, where neither helps.
    """

    make_room: Callable[[], bool]
    may_cut: bool
    note: str
