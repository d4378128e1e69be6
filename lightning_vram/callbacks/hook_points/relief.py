"""What another callback can do after an OOM, before the batch is split."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Relief:
    """Used by the callback that repeats a batch after an OOM."""

    # Makes the step need less, on all ranks alike; ``False`` if it cannot. Called when the first try is gone.
    make_room: Callable[[], bool]
    may_cut: bool  # whether the batch may then be split
    note: str  # for the error, if neither helps
