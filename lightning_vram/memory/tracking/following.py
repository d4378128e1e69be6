"""Follow what no operator shows: which module is running, and storages that are resized."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.memory.tracking.ledger import Ledger
from lightning_vram.private_names.torch.modules import look_on

_listeners: list[tuple[Callable[[nn.Module], None], Callable[[nn.Module], None]]] = []
_resizing: list[Ledger] = []


@contextmanager
def module_scope(module: nn.Module) -> Iterator[None]:
    """Name ``module`` as running inside the block: recomputation calls a forward without ``__call__`` and its hooks."""
    called = list(_listeners)
    for enter, _ in called:
        enter(module)
    try:
        yield
    finally:
        for _, leave in called:
            leave(module)


def follow_modules(stack: ExitStack, ledger: Ledger, root: nn.Module | None, on_forward: Callable[[], None]) -> None:
    """Keep the name of the innermost running module in the ledger."""
    names = {id(module): name for name, module in root.named_modules()} if root is not None else {}
    outer: list[tuple[nn.Module, str, bool]] = []

    def enter(module: nn.Module, *_: Any) -> None:
        on_forward()
        outer.append((module, ledger.module, ledger.is_in_reducer))
        ledger.module = names.get(id(module), ledger.module)
        ledger.is_in_reducer = isinstance(module, DistributedDataParallel)

    def leave(module: nn.Module, *_: Any) -> None:
        while outer:  # a module left by an exception that its hook did not see is skipped
            left, ledger.module, ledger.is_in_reducer = outer.pop()
            if left is module:
                return

    _listeners.append((enter, leave))
    stack.callback(_listeners.remove, (enter, leave))
    stack.callback(look_on(enter, leave))


def follow_resizes(stack: ExitStack, ledger: Ledger) -> None:
    """Note ``UntypedStorage.resize_``, with which FSDP frees and fills parameters: it does not dispatch."""
    if not _resizing:
        torch.UntypedStorage.resize_ = _resize_and_tell  # type: ignore[method-assign, assignment]
    _resizing.append(ledger)

    def stop() -> None:
        _resizing.remove(ledger)
        if not _resizing:
            del torch.UntypedStorage.resize_  # the one of its base shows again

    stack.callback(stop)


def _resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
    was_empty = storage.nbytes() == 0
    result = super(torch.UntypedStorage, storage).resize_(size)
    for ledger in _resizing:
        if was_empty:
            ledger.add_storage(storage, storage.device, "resize_")
        else:
            ledger.update_storage(storage)
    return result
