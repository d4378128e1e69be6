"""Let a forward run twice and count once: buffers move in the first run only.

Recomputation runs a forward again, and whatever the forward writes into buffers would be written twice: BatchNorm
moves its running statistics two times per step (pytorch#96136), spectral norm iterates from another start and
computes another weight. Here the second run works on copies that are thrown away, and starts from the values the
first run started from.
"""

from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_Place = tuple[nn.Module, str]


class BufferShield:
    """Remember the buffers before a forward; as a context manager, shield them while it runs again.

    Args:
        modules: Modules whose buffers, and those of their children, the forward may write.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._before = {place: (buffer, _version(buffer), _copy(*place, buffer)) for place, buffer in self._iterate()}
        self._starts: dict[_Place, Tensor] = {}
        self._originals: dict[_Place, Tensor | None] = {}

    def keep_changed(self) -> None:
        """Call after the forward: forget the buffers it did not change, keep where the others started from."""
        for place, buffer in self._iterate():
            before, version, start = self._before.get(place, (None, None, None))
            if start is not None and (buffer is not before or _version(buffer) != version):
                self._starts[place] = start
        self._before.clear()

    def __enter__(self) -> None:
        for place, buffer in list(self._iterate()):
            module, name = place
            stand_in = self._starts.get(place)
            if stand_in is None and not _is_statistic(module, name):
                continue
            self._originals[place] = buffer
            with torch.no_grad():
                # A copy of the copy: a retained graph may be recomputed more than once.
                module._buffers[name] = (buffer if stand_in is None else stand_in).clone()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (module, name), buffer in self._originals.items():
            module._buffers[name] = buffer
        self._originals.clear()

    def _iterate(self) -> Iterator[tuple[_Place, Tensor]]:
        for root in self._modules:
            for module in root.modules():
                yield from (((module, name), buffer) for name, buffer in module._buffers.items() if buffer is not None)


def has_buffers(modules: Sequence[nn.Module]) -> bool:
    """Whether there is anything to shield."""
    return any(True for module in modules for _ in module.buffers())


def _copy(module: nn.Module, name: str, buffer: Tensor) -> Tensor | None:
    if _is_statistic(module, name):
        return None  # written, never read while training: the values in a second run do not matter
    with torch.no_grad():
        return buffer.clone()


def _is_statistic(module: nn.Module, name: str) -> bool:
    # By type and by name: batch norm kernels write their statistics without moving the version counter.
    return (isinstance(module, _NormBase) and module.training) or name in ("running_mean", "running_var")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
