"""Private names of torch's dispatcher, operators and compiler, of fake tensors and fake ranks."""

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
from typing_extensions import override

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "QuickFakeMode",
    "TorchDispatchMode",
    "current_dispatch_mode",
    "current_dispatch_modes",
    "detect_fake_mode",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "without_modes",
]

DispatchKey = torch._C.DispatchKey
ASK_DEVICE = torch.ops.prim.device.default
"""What C++ asks fake tensors for their device with, through all modes, twice as often as it runs operators. A mode that
has nothing to say to it returns ``tensor.device``, which they answer in Python."""
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


_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout})


class QuickFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode that knows plain tensors again by one tuple each: torch's makes an object of 17 fields and a flat list."""

    @override
    def _prep_args_for_hash(self, result: list[Any], args: Any, *state: Any) -> None:
        if not isinstance(args, list | tuple):
            super()._prep_args_for_hash(result, args, *state)
            return
        result += (type(args), len(args))
        for arg in args:
            if self._is_plain(arg):
                result.append(
                    (
                        *(arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.untyped_storage().nbytes()),
                        *(arg.device, arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference()),
                    )
                )
            elif type(arg) in _PLAIN_TYPES:
                result += (type(arg), arg)
            elif isinstance(arg, list | tuple):
                self._prep_args_for_hash(result, arg, *state)
            else:
                super()._prep_args_for_hash(result, (arg,), *state)

    def _is_plain(self, arg: Any) -> bool:
        return (
            isinstance(arg, FakeTensor)
            and arg.fake_mode is self
            and arg.constant is None
            and arg.layout is torch.strided
            and not arg.is_quantized
        )


def default_device_of_block() -> torch.device | None:
    """Return the device of the innermost ``with torch.device(...)``, or the default one that was set, if there is any.

    ``torch.get_default_device`` makes a tensor to find out, and takes a hundred times as long where there is none.
    """
    if not torch._C._len_torch_function_stack():
        return None
    modes = reversed(current_function_modes())  # type: ignore[no-untyped-call]
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
