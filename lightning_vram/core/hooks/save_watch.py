"""Observe what autograd saves."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.stage import pack_in_place, unpack
from lightning_vram.private_names.torch.autograd import hide_warning_of_hooks, innermost_hooks


class SaveWatch:
    """Hooks that call ``on_save`` with each saved tensor, not to be kept, and pass it on to the hooks outside."""

    def __init__(self, on_save: Callable[[Tensor], None]) -> None:
        hide_warning_of_hooks()
        self._pack, self._unpack = innermost_hooks() or (pack_in_place, unpack)
        self._on_save = on_save

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which it watches."""
        return saved_tensors_hooks(self.pack, self._unpack)

    @hide_from_dynamo
    def pack(self, tensor: Tensor) -> Any:
        """The hook: observe a tensor, and pass it on."""
        self._on_save(tensor)
        return self._pack(tensor)
