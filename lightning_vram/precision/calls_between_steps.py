"""Let a module whose weights are in 16 bit be called between steps, too: in hooks that sample or evaluate.

No autocast is on there, and layers refuse inputs in float32 with weights in 16 bit. A plain run computes such calls in
float32; here they compute as a step does, and return float32.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.surgery.class_swap import Swaps, has_own_forward, plain_class_forward
from lightning_vram.core.tensors.nests import cast_where

_KEY = "_lightning_vram_between_steps"


class CallsBetweenSteps(Swaps):
    """Of a module and its direct parts, until :meth:`remove`.

    Args:
        module: With weights in ``dtype``.
        device_type: Where it runs.
        dtype: Of autocast.

    Raises:
        ValueError: If the class of a module cannot be changed.
    """

    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
        super().__init__(_KEY)
        self.device_type, self.dtype = device_type, dtype
        self._is_in_step = False
        with self.all_or_none():
            for part in (module, *module.children()):
                is_called = plain_class_forward(part) is not nn.Module.forward or has_own_forward(part)
                if is_called and not isinstance(part, torch.jit.ScriptModule):
                    self.add(part, self, _run)

    @contextmanager
    def in_step(self) -> Generator[None, None, None]:
        """While a step decides for itself what is autocast."""
        outer, self._is_in_step = self._is_in_step, True
        try:
            yield
        finally:
            self._is_in_step = outer

    def computes(self) -> bool:
        """Whether a call that begins now is one between steps."""
        return not self._is_in_step and not torch.is_autocast_enabled(self.device_type)


def _run(module: nn.Module, calls: CallsBetweenSteps, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward``, which is ``plain``."""
    if not calls.computes():
        return plain(*args, **kwargs)
    with torch.autocast(calls.device_type, dtype=calls.dtype, cache_enabled=False):
        output = plain(*args, **kwargs)
    return cast_where(lambda leaf: isinstance(leaf, Tensor) and leaf.dtype == calls.dtype, torch.float32, output)
