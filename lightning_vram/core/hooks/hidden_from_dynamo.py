"""Keep ``torch.compile`` from compiling our own hooks, which run inside of compiled code."""

from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_vram.private_names.torch.compiled import skip_code

_Function = TypeVar("_Function", bound=Callable[..., object])


def hide_from_dynamo(function: _Function) -> _Function:
    """Return ``function``, which Dynamo will run as it is, with all that it calls.

    ``torch.compiler.disable`` does it with a wrapper around every call, a tenth of the cost of a dispatch mode. Marking
    the code once costs nothing.
    """
    if skip_code(function):
        return function
    return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
