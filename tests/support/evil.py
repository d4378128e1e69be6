"""A pickle that leaves a mark when it is run."""

import os
from pathlib import Path


class Evil:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._mark),)
