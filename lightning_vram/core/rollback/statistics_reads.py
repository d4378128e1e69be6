"""Notice a layer that reads the running statistics of its own norms while it trains.

Norms write them and nobody reads them, so a second run need not find them as they were: no copies in every step. A
layer that does read them (a penalty on the drift of the mean) is found out in its first call.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core.hooks.mode import QuietMode
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.private_names.torch.modules import NormBase
from lightning_vram.private_names.torch.operator_calls import call_operator
from lightning_vram.private_names.torch.trees import tree_leaves


class StatisticsReads(QuietMode):
    """Watches a first call: :attr:`has_read` tells afterwards."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        members = (member for module in modules for member in module.modules() if isinstance(member, NormBase))
        self._addresses = {storage_address(buffer) for member in members for buffer in member.buffers(recurse=False)}
        self._addresses -= {0}
        self.has_read = False

    @property
    def is_needed(self) -> bool:
        """Whether there are statistics."""
        return bool(self._addresses)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not (self.has_read or "batch_norm" in str(func) or func is torch.ops.aten.add_.Tensor):
            leaves = tree_leaves((args, kwargs))
            self.has_read = any(isinstance(x, Tensor) and storage_address(x) in self._addresses for x in leaves)
        return call_operator(func, args, kwargs)
