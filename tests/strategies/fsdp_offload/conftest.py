import pytest

from lightning_vram.core.host import split_weights
from lightning_vram.optimizers.on_host import averages, split_steps


@pytest.fixture
def _small_parts(monkeypatch):
    """Weights in several parts, and parts of several weights."""
    for module in (averages, split_weights, split_steps):
        monkeypatch.setattr(module, "PART_ELEMENTS", 512)
