"""Put something in the place of a function of torch, and take it back."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Let attributes of a module or class be others inside the block; those that are not there appear."""
    with ExitStack() as stack:
        for name, value in values.items():
            before = vars(owner).get(name)
            stack.callback(delattr, owner, name) if before is None else stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)
        yield
