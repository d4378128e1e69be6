"""What all tests of plans share."""

import pytest

from lightning_vram.callbacks.auto_vram import decision


@pytest.fixture(autouse=True)
def _has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy a search may last for longer than it is given, and find something else."""
    monkeypatch.setattr(decision, "_LEAST_SECONDS", 3600.0)
