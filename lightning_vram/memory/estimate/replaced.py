"""Patch attributes of torch, and restore them."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Patch attributes of a module or class inside the block; missing ones are added."""
    with ExitStack() as stack:
        for name, value in values.items():
            before = vars(owner).get(name)
            stack.callback(delattr, owner, name) if before is None else stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)
        yield
