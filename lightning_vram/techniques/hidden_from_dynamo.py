"""Keep ``torch.compile`` from compiling our own hooks, which run inside of what it compiles.

``torch.compiler.disable`` does it with a wrapper around every call, a tenth of what a dispatch mode costs. Marking
the code once costs nothing.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def hide_from_dynamo(function: _Function) -> _Function:
    """Return ``function``, which Dynamo will run as it is, and all that it calls."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    names = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    if frames is None or not all(hasattr(frames, name) for name in names):
        return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
