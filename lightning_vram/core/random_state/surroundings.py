"""What a layer finds around it: autocast, the default device, where torch's generators of random numbers stand."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from lightning_vram.core.random_state.sources import default_source
from lightning_vram.private_names.torch.dispatch import default_device_of_block

_HOST = torch.device("cpu")
_Autocast = tuple[bool, torch.dtype, bool]


class Surroundings:
    """What there is now.

    Args:
        devices: On which the layer may compute or draw, besides the host.
    """

    __slots__ = ("_autocasts", "_default_device", "_generators")

    def __init__(self, devices: set[torch.device]) -> None:
        devices.add(_HOST)
        kinds = {device.type for device in devices}
        self._autocasts = {kind: _read_autocast(kind) for kind in kinds if _can_autocast(kind)}
        self._default_device = default_device_of_block()
        sources = filter(None, map(default_source, devices - {torch.device("meta")}))
        self._generators = [(read, write, read()) for read, write in sources]

    @contextmanager
    def as_they_were(self) -> Iterator[None]:
        """Let it be as it was inside the block; generators go on afterwards from where they are now."""
        now = [(write, read()) for read, write, _ in self._generators]
        try:
            for _, write, state in self._generators:
                write(state)
            with ExitStack() as stack:
                for kind, then in self._autocasts.items():
                    if then != _read_autocast(kind):
                        is_enabled, dtype, has_cache = then
                        stack.enter_context(torch.autocast(kind, dtype, is_enabled, has_cache))
                if self._default_device is not None:
                    stack.enter_context(self._default_device)
                yield
        finally:
            for write, state in now:
                write(state)


@cache
def _can_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def _read_autocast(kind: str) -> _Autocast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
