"""Kernels of ours at a dispatch key of its own, in front of autograd, on in one thread for the time of a block."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

# Autocast's keys stand in front of autograd's, the second before the first. No kernel of torch is at these two.
BEHIND_AUTOCAST = "AutocastIPU"
AUTOCAST = "AutocastHPU"

Kernel = Callable[..., Any]


def operator_named(name: str) -> Any:
    """Return the operator with a name such as ``"aten::norm.Scalar"``."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def operators_cast_for(device_type: str) -> frozenset[str]:
    """Return the names of the operators that autocast has a kernel for."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device_type.upper()}"))


@contextmanager
def kernels_at(key: str, kernels: Mapping[str, Kernel]) -> Iterator[None]:
    """Let operators, by name, run our kernels at one of the keys above, in this thread."""
    with ExitStack() as stack:
        others = stack.enter_context(torch.library._scoped_library("_", "IMPL"))
        others.fallback(torch.library.fallthrough_kernel, key)
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name, kernel in kernels.items():
            library.impl(name.removeprefix("aten::"), kernel, key)
        device_type = key.removeprefix("Autocast").lower()
        stack.callback(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type))
        torch.set_autocast_enabled(device_type, enabled=True)  # the keys of autocast are off by default
        stack.enter_context(torch._C._IncludeDispatchKeyGuard(getattr(torch._C.DispatchKey, key)))
        yield


def pass_by(key: str) -> AbstractContextManager[None]:
    """Make a context in which operators do not stop at ``key``."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return torch._C._ExcludeDispatchKeyGuard(keys)
