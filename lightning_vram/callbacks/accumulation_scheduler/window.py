"""Where a run stands between two optimizer steps."""

from dataclasses import dataclass
from typing import Any


@dataclass
class AccumulationWindow:
    """The micro-batches that one optimizer step is made of: how many are planned, and how far it has come.

    Lightning decides by batch index, so that a factor that changes leaves gradients of one window in the next. A
    window ends when it is full, or with its epoch; only then the next one is planned.

    Args:
        length: Micro-batches planned.
        position: Of the micro-batch under way, or of the last one; from 1 on.
        batch: Running number of that batch over the run (``batch_progress.total.ready``). ``None`` before any.
        num_places: Places of the window taken since it, or the process that resumed it, began: equal on all ranks.
        num_begun: Micro-batches among them that were there.
        num_held: Those of them whose gradients count.
        is_held: Whether the one under way counts already.
    """

    length: int = 1
    position: int = 1
    batch: int | None = None
    num_places: int = 0
    num_begun: int = 0
    num_held: int = 0
    is_held: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the optimizer steps with the micro-batch under way."""
        return self.position >= self.length

    @property
    def is_first(self) -> bool:
        """Whether there is no gradient of this window yet that may be kept."""
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
        """Give a batch that is not there a place, so that ranks stay in step.

        The last place is left to the next batch: Lightning steps with a batch alone. Other ranks cannot have stepped
        at this one, since the step waits for all of them.
        """
        self.batch = batch
        if self.position < self.length - 1:
            self.position += 1
            self.num_places += 1

    def hold(self) -> bool:
        """Count the micro-batch under way; it may have several backward passes, and counts once.

        Returns:
            Whether it was the first time.
        """
        is_new = not self.is_held
        self.num_held += is_new
        self.is_held = True
        return is_new

    def close(self) -> None:
        """End the window as it is."""
        self.position = self.length

    def rewind(self) -> None:
        """Take the micro-batch under way back: it will be run again."""
        self.position -= 1

    def state_dict(self, *, is_interrupted: bool) -> dict[str, Any]:
        """What a checkpoint needs. Gradients are not in it.

        Args:
            is_interrupted: Whether the micro-batch under way will be run again.
        """
        return {"length": self.length, "position": self.position - is_interrupted, "batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the middle of a window, without the gradients it had."""
        self.length, self.position, self.batch = (state_dict[key] for key in ("length", "position", "batch"))
        self.num_places = self.num_begun = self.num_held = 0
        self.is_held = False
