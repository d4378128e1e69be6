"""What autograd counts: the version of a tensor goes up with each write, and views share it.

While saved-tensor hooks are set, autograd does not look whether a saved tensor was overwritten. These do.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

NO_VERSION = -1


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written to; :data:`NO_VERSION` if it is an inference tensor, which has none."""
    try:
        return tensor._version
    except RuntimeError:
        return NO_VERSION


def storage_address(tensor: Tensor) -> int:
    """Return what all views of one memory have in common; 0 for tensors without one piece of memory (sparse)."""
    try:
        return torch._C._storage_address(tensor)  # type: ignore[attr-defined, no-any-return]
    except (NotImplementedError, RuntimeError):
        return 0


def is_strided(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary one: its bytes are its elements."""
    return tensor.layout is torch.strided and not tensor.is_nested


def version_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the version counter of ``tensor``: it tells of writes and holds no memory."""
    counter = alias(tensor)
    counter.data = _nothing(tensor.dtype, tensor.device)
    return counter


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def alias(tensor: Tensor) -> Tensor:
    """Return another tensor on the same memory and version counter, without a past and deaf to ``.data =``."""
    key = torch._C.DispatchKey.ADInplaceOrView
    if torch._C._dispatch_tls_is_dispatch_key_excluded(key):  # below autograd an alias would count versions on its own
        is_excluded = False
        with torch._C._SetExcludeDispatchKeyGuard(key, is_excluded):
            return _detach(tensor)
    return _detach(tensor)


def _detach(tensor: Tensor) -> Tensor:
    if type(tensor) is Tensor or type(tensor) is torch.nn.Parameter:
        with torch._C._DisableTorchDispatch():  # nobody needs to see it
            return tensor.detach()
    return tensor.detach()


def check_version(counter: Tensor, expected: int, shape: Sequence[int]) -> None:
    """Raise autograd's error if a saved tensor was overwritten: its own check is off while hooks are set."""
    if counter._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{counter.type()} {list(shape)}] is at version {counter._version}; expected version {expected} "
            "instead."
        )
