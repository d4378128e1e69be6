"""Operators on their way to a kernel: modes that see them, keys that send them there, tensors that only pretend.

* ``torch.utils._python_dispatch.TorchDispatchMode``: sees each operator | 2.11 - | nothing works
* ``torch.utils._python_dispatch.TorchDispatchMode._should_skip_dynamo``: leave out the wrapper around each call |
  2.11 - | each operator takes some microseconds longer under our modes
* ``torch.utils._python_dispatch._get_current_dispatch_mode``: the innermost mode | 2.11 - | recomputation fails
* ``torch.utils._python_dispatch._get_current_dispatch_mode_stack``: all modes | 2.11 - | shared casts fail
* ``torch.utils._python_dispatch.is_traceable_wrapper_subclass``: tensors made of tensors | 2.11 - | nothing works
* ``torch.utils._python_dispatch.is_traceable_wrapper_subclass_type``: the same, by class | 2.11 - | nothing works
* ``torch._C._len_torch_function_stack``: whether there are modes for functions | 2.11 - | recomputation fails
* ``torch.overrides._get_current_function_mode_stack``: which | 2.11 - | as without ``_len_torch_function_stack``
* ``torch.utils._device.DeviceContext``: the mode of ``with torch.device(...)`` | 2.11 - | as without
  ``_len_torch_function_stack``
* ``torch._subclasses.fake_tensor.FakeTensor``: tensors without memory | 2.11 - | nothing works
* ``torch._subclasses.fake_tensor.FakeTensorMode``: makes such of all | 2.11 - | no step is estimated
* ``torch._guards.detect_fake_mode``: whether some are among inputs | 2.11 - | memory cannot be tracked
* ``torch.utils._python_dispatch._disable_current_modes``: be outside of all modes | 2.11 - | no step of several
  processes is estimated
* ``torch._C._DisableTorchDispatch``: run past all modes and subclasses | 2.11 - | nothing works
* ``torch._C.DispatchKey``: where operators go | 2.11 - | aliases of tensors, memory tracking and save policies fail
* ``torch._C._dispatch_tls_is_dispatch_key_excluded``: whether autograd is passed by | 2.11 - | no tensor is kept
* ``torch._C._SetExcludeDispatchKeyGuard``: pass autograd by, or not | 2.11 - | nothing is kept below autograd
"""

from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import _get_current_function_mode_stack as current_function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "current_dispatch_mode",
    "current_dispatch_modes",
    "detect_fake_mode",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "without_modes",
]

DispatchKey = torch._C.DispatchKey
without_dispatch: Any = torch._C._DisableTorchDispatch
"""Make a context in which no dispatch mode and no subclass sees what runs."""
is_key_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
"""Whether operators pass a dispatch key by in this thread."""
set_key_excluded: Any = torch._C._SetExcludeDispatchKeyGuard
"""Make a context in which operators pass a dispatch key by, or do not."""


class UnwrappedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode without torch's wrapper that hides each call from Dynamo: it hides itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def default_device_of_block() -> torch.device | None:
    """Return the device of the innermost ``with torch.device(...)``, or the default one that was set, if there is any.

    ``torch.get_default_device`` makes a tensor to find out, and takes a hundred times as long where there is none.
    """
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(current_function_modes())  # type: ignore[no-untyped-call]
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
