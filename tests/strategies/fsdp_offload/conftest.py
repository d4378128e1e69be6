import pytest

from lightning_vram.core.host import memory
from lightning_vram.optimizers import averages, step_loop


@pytest.fixture
def _small_parts(monkeypatch):
    """Weights in several parts, and parts of several weights."""
    for module in (averages, memory, step_loop):
        monkeypatch.setattr(module, "PART_ELEMENTS", 512)


@pytest.fixture(autouse=True)
def _nothing_is_left(leaves_nothing):
    """Module, Trainer, strategy and shards of every fit, also of one that fails."""
