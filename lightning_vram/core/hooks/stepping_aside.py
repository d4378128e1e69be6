"""Step aside where a dispatch mode or saved-tensor hooks would change what runs."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import graph

from lightning_vram.core.surgery.held_setting import HeldSetting
from lightning_vram.private_names.torch.autograd import (
    RunBackward,
    engine_run_backward,
    innermost_hooks,
    pop_hooks,
    push_hooks,
    replace_run_backward,
)
from lightning_vram.private_names.torch.dispatch import TorchDispatchMode, current_dispatch_mode


class OwnHooks(ABC):
    """Saved-tensor hooks that are their own context, without a wrapper between them and autograd."""

    @abstractmethod
    def pack_hook(self, tensor: Tensor) -> Any:
        """Get a tensor that autograd saves; return what it keeps."""

    @abstractmethod
    def unpack_hook(self, packed: Any) -> Tensor:
        """Return the tensor."""

    def __enter__(self) -> None:
        push_hooks((self.pack_hook, self.unpack_hook))

    def __exit__(self, *args: object) -> None:
        pop_hooks()


Hooks = graph.saved_tensors_hooks | OwnHooks


class _Active(threading.local):
    def __init__(self) -> None:
        self.entered: list[tuple[Hooks, TorchDispatchMode | None]] = []  # in this thread, innermost last


_active = _Active()
# Bound for good: whoever imports one of ours by name inside a step keeps it.
_disable: Callable[[str], AbstractContextManager[None]] = graph.disable_saved_tensors_hooks
_backward: RunBackward | None = engine_run_backward()


class stepping_aside:  # noqa: N801 - a context, quicker than one made by a generator
    """Take ``hooks`` off for each ``torch.func`` transform inside the block, and ``mode`` for each backward.

    Enter it right after the hooks: nested ones are taken off from the innermost on.
    """

    def __init__(self, hooks: Hooks, mode: TorchDispatchMode | None = None) -> None:
        self._entry = (hooks, mode)

    def __enter__(self) -> None:
        _active.entered.append(self._entry)
        _functions.acquire()

    def __exit__(self, *args: object) -> None:
        _functions.release()
        _active.entered.pop()


@contextmanager
def _disable_without_ours(message: str) -> Iterator[None]:
    # Hooks of the user's own on top of ours stay: the transform refuses them, as it would without us.
    with ExitStack() as stack:
        for hooks, _ in reversed(_active.entered):
            innermost = innermost_hooks()
            if innermost is None or innermost[0] != hooks.pack_hook:
                break
            hooks.__exit__(None, None, None)
            stack.callback(hooks.__enter__)
        with _disable(message):
            yield


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    assert _backward is not None
    with ExitStack() as stack:
        for _, mode in reversed(_active.entered):
            if mode is None:
                continue
            if current_dispatch_mode() is not mode:
                break
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            stack.callback(mode.__enter__)
        return _backward(*args, **kwargs)


def _replace_functions(functions: tuple[Any, Any]) -> None:
    graph.disable_saved_tensors_hooks, run_backward = functions
    if _backward is not None:  # without it a backward inside may round differently in few operators
        replace_run_backward(run_backward)


_ours: tuple[Any, Any] = (_disable_without_ours, _run_backward)
_functions = HeldSetting(lambda: (_disable, _backward), _replace_functions, _ours)
