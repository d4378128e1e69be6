"""``torch.autocast`` where there is no CUDA: it lets itself be entered, and the stand-in's kind means ``"cuda"``.

Whether autocast is on, and to what, stays where torch keeps it: with ``"cuda"``, in each thread. So whatever saves and
restores it (``torch.utils.checkpoint``, ``custom_bwd``) does so here, too.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lightning_vram.memory.estimate.replaced import replaced
from lightning_vram.private_names.torch.autocast import AVAILABILITY, CAST_ARGUMENTS

_OF_A_KIND = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")


@contextmanager
def autocast_of(kind: str, *, clear_cache: Callable[[], None]) -> Iterator[None]:
    """Let autocast of ``kind`` be autocast of ``"cuda"``, inside the block."""

    def as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*("cuda" if arg == kind else arg for arg in args), **kwargs)

    forget, construct = torch.clear_autocast_cache, torch.autocast.__init__
    (has_availability, available), (has_cast, cast) = AVAILABILITY, CAST_ARGUMENTS
    is_available, cast_arguments = getattr(has_availability, available), getattr(has_cast, cast)

    def forget_all() -> None:
        forget()
        clear_cache()

    def enter(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        construct(self, "cuda" if device_type == kind else device_type, *args, **kwargs)

    def cast_to(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast_arguments(value, kind if device_type == "cuda" else device_type, dtype)

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, {name: as_cuda(getattr(torch, name)) for name in _OF_A_KIND}))
        stack.enter_context(replaced(torch, {"clear_autocast_cache": forget_all}))
        stack.enter_context(replaced(torch.autocast, {"__init__": enter}))
        stack.enter_context(replaced(has_availability, {available: as_cuda(is_available)}))
        stack.enter_context(replaced(has_cast, {cast: cast_to}))
        stack.callback(clear_cache)
        yield
