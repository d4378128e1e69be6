"""See what autograd saves, and leave what becomes of it to whatever hooks are set outside."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.stage import pack_in_place, unpack
from lightning_vram.private_names.torch.autograd import hide_warning_of_hooks, innermost_hooks


class SaveWatch:
    """Hooks that tell what is saved, and hand on to those that are set when it is made.

    Args:
        on_save: Called with each tensor that autograd saves; must not keep it.
    """

    def __init__(self, on_save: Callable[[Tensor], None]) -> None:
        hide_warning_of_hooks()
        self._pack, self._unpack = innermost_hooks() or (pack_in_place, unpack)
        self._on_save = on_save

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which it watches."""
        return saved_tensors_hooks(self.pack, self._unpack)

    @hide_from_dynamo
    def pack(self, tensor: Tensor) -> Any:
        """Tell, and hand on."""
        self._on_save(tensor)
        return self._pack(tensor)
