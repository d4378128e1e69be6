"""Keep ``torch.compile`` from compiling our own hooks, which run inside of what it compiles.

``torch.compiler.disable`` does it with a wrapper around every call, a tenth of what a dispatch mode costs. Marking
the code once costs nothing.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_vram.private_names.torch.compiled import skip_code

_Function = TypeVar("_Function", bound=Callable[..., object])


def hide_from_dynamo(function: _Function) -> _Function:
    """Return ``function``, which Dynamo will run as it is, and all that it calls."""
    if skip_code(function):
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
