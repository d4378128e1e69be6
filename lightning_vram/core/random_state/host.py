"""Random numbers that do not come from torch: Python's and NumPy's, as in hand-written stochastic depth."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lightning_vram.core.random_state.sources import differs, host_sources


@dataclass
class DrawnNumbers:
    """What was learned about a layer in its first run.

    Args:
        from_numpy: Whether it draws from NumPy's global generator, whose state takes long to read; ``None`` before.
    """

    from_numpy: bool | None = None


class HostRandomState:
    """The state of Python's and NumPy's global generators; as a context manager, the time in which it holds again.

    Args:
        drawn: What is known about the layer; filled in after the first run. A layer that draws from NumPy in later
            runs only is not noticed.
    """

    def __init__(self, drawn: DrawnNumbers) -> None:
        self._drawn = drawn
        sources = host_sources()[: 1 if drawn.from_numpy is False else None]
        self._generators = [(read, write, read()) for read, write in sources]
        self._restores: list[tuple[Callable[[Any], object], Any]] = []

    def has_drawn(self) -> bool:
        """Whether a number was drawn since."""
        return any(differs(start, read()) for read, _, start in self._generators)

    def settle(self) -> None:
        """Call after the forward: forget the states of generators nothing was drawn from."""
        changed = [(read, write, start) for read, write, start in self._generators if differs(start, read())]
        if self._drawn.from_numpy is None:
            self._drawn.from_numpy = any(write is not random.setstate for _, write, _ in changed)
        self._generators = changed

    def __enter__(self) -> None:
        for read, write, start in self._generators:
            self._restores.append((write, read()))
            write(start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._restores:
            write, now = self._restores.pop()
            write(now)
