"""The current accumulation window."""

from dataclasses import dataclass
from typing import Any


@dataclass
class AccumulationWindow:
    """The micro-batches of one optimizer step: how many are planned, and how many have run.

    A window ends when it is full, or with its epoch; only then the next one is planned.
    """

    length: int = 1  # micro-batches planned
    position: int = 1  # of the current or last micro-batch, from 1
    batch: int | None = None  # number of that batch in the run (``batch_progress.total.ready``); ``None`` before any
    num_places: int = 0  # taken since the window, or the process that resumed it, began: equal on all ranks
    num_begun: int = 0  # micro-batches among them that were not missing
    num_held: int = 0  # those of them whose gradients count
    is_held: bool = False  # whether the current one counts already

    @property
    def is_full(self) -> bool:
        """Whether the optimizer steps with the current micro-batch."""
        return self.position >= self.length

    @property
    def is_first(self) -> bool:
        """Whether no earlier micro-batch of this window has gradients."""
        return self.num_begun <= 1

    def open(self, length: int) -> None:
        """Begin the next window."""
        self.length = length
        self.position = self.num_places = self.num_begun = self.num_held = 0

    def begin(self, batch: int) -> None:
        """Begin a micro-batch."""
        self.position += 1
        self.num_places += 1
        self.num_begun += 1
        self.batch = batch
        self.is_held = False

    def pass_over(self, batch: int) -> None:
        """Give a missing batch a place, so that ranks stay in step.

        The last place is left to the next batch: Lightning steps with a batch alone. Other ranks cannot have stepped
        at this one, since the step waits for all of them.
        """
        self.batch = batch
        if self.position < self.length - 1:
            self.position += 1
            self.num_places += 1

    def hold(self) -> bool:
        """Count the current micro-batch, once for several backward passes; return whether it is the first."""
        is_new = not self.is_held
        self.num_held += is_new
        self.is_held = True
        return is_new

    def state_dict(self, *, is_interrupted: bool) -> dict[str, Any]:
        """What a checkpoint needs, without gradients. If interrupted, the current micro-batch will run again."""
        return {"length": self.length, "position": self.position - is_interrupted, "batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the middle of a window, without its gradients."""
        self.length, self.position, self.batch = (state_dict[key] for key in ("length", "position", "batch"))
        self.num_places = self.num_begun = self.num_held = 0
        self.is_held = False
