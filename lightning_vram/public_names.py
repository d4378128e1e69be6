"""All public names, imported: what ``lightning_vram`` gives, and the ``lightning-vram`` command loads on demand."""

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning_vram.strategies.registration import register_strategies

    register_strategies()
    del register_strategies
