"""Which modules and parameters are sharded."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule  # absent from builds without torch.distributed


def is_shard(parameter: Tensor | None) -> bool:
    """Whether ``parameter`` is a part of one that lies on several ranks."""
    return type(parameter) is not nn.Parameter and isinstance(parameter, DTensor)  # the first is quick


def sharded_modules(module: nn.Module) -> Iterator[Any]:
    """Yield the parts of ``module`` that FSDP2 shards, itself included: their parameters come and go with the calls."""
    if dist.is_available():
        yield from (part for part in module.modules() if isinstance(part, FSDPModule))


def is_sharded(module: nn.Module) -> bool:
    """Whether there are FSDP2 modules in ``module``."""
    return next(sharded_modules(module), None) is not None
