"""How the simulated device treats a program; CUDA's does as it likes."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from support.devices import DEVICE, device_module


def settings(**values: Any) -> AbstractContextManager[Any]:
    return device_module().settings(**values) if DEVICE == "sim" else nullcontext()


def patient(num_queries: int = 1000) -> AbstractContextManager[Any]:
    """So many times whoever asks for a copy hears that it is not over."""
    return settings(patience=num_queries)
