"""Say which module is running where a forward is called without the module's ``__call__``, and its hooks.

Recomputation runs a layer's forward by itself: the hooks of the user must not fire a second time, yet a tracker wants
to know whose bytes are made.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

Listener = tuple[Callable[[nn.Module], None], Callable[[nn.Module], None]]

_listeners: list[Listener] = []


def listen(enter: Callable[[nn.Module], None], leave: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Have ``enter`` and ``leave`` called around every :func:`module_scope`; returns what ends that."""
    listener = (enter, leave)
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


@contextmanager
def module_scope(module: nn.Module) -> Iterator[None]:
    """Tell the listeners that ``module`` runs inside the ``with`` block."""
    called = list(_listeners)
    for enter, _ in called:
        enter(module)
    try:
        yield
    finally:
        for _, leave in called:
            leave(module)
