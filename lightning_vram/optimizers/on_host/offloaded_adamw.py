"""AdamW on the host for a sharded module, without Lightning."""

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import AdamW

from lightning_vram.memory.host.cores import cores_of_rank
from lightning_vram.optimizers.on_host.optimizers import HostOptimizers
from lightning_vram.techniques.sharding import FullSharding


class OffloadedAdamW(AdamW):
    """AdamW whose step overlaps with the next forward, on the host and on the shards of this rank.

    Schedulers, ``state_dict`` and hooks work as with ``torch.optim.AdamW``. ``step()`` returns before the step is over;
    reading a parameter, gradient or state waits for it, layer by layer. Attach other optimizers of ``torch.optim`` to
    :class:`~lightning_vram.optimizers.on_host.optimizers.HostOptimizers`. ZeRO-Offload
    (https://arxiv.org/abs/2101.06840) steps after the backward, and waits.

    Args:
        sharding: Of the module that is trained.
        params: Its parameters, or groups of them; all by default.
        lr: As that of ``torch.optim.AdamW``.
        step_in_backward: Step a layer as soon as the backward has its gradients, in ``step(closure)``: only if nothing
            looks at gradients after the backward or changes them, as clipping does.
        num_threads: That a step uses; the cores of this process by default.
        nvme_path: Folder on a fast local disk for the states, in place of host memory.
        options: More of ``torch.optim.AdamW``.

    Raises:
        ValueError: If an option is out of range, or ``nvme_path`` is no folder.
        OffloadError: If there is no room at ``nvme_path``.

    Example:
        >>> import torch.distributed as dist
        >>> import torch
        >>> from torch import nn
        >>> from lightning_vram.techniques.sharding import FullSharding, ShardingOptions
        >>> from lightning_vram.techniques.sharding.grouping.plan import plan_sharding_groups
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        >>> sharding = FullSharding(model, mesh, plan_sharding_groups(model), ShardingOptions())
        >>> optimizer = OffloadedAdamW(sharding, lr=1e-2)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.close()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        sharding: FullSharding,
        params: Iterable[Any] | None = None,
        lr: float | Tensor = 1e-3,
        *,
        step_in_backward: bool = False,
        num_threads: int | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(sharding.module.parameters() if params is None else params, lr, **options)
        self._sharding = sharding
        self._host = HostOptimizers(sharding, num_threads=num_threads or cores_of_rank(1), nvme_path=nvme_path)
        self._host.may_step_early = lambda closure: step_in_backward
        self._host.attach([self])

    def clip_norm(self, max_norm: float) -> None:
        """Clip gradients to a common 2-norm over all ranks, in the threads of the step.

        Args:
            max_norm: Largest norm.
        """
        self._host.clip_norm(self, max_norm, may_wait=True)

    def finish(self) -> None:
        """Wait until the step is over.

        Raises:
            BaseException: What it has raised.
        """
        self._host.finish()

    def close(self) -> None:
        """Make module and optimizer plain again, on all ranks: all must take part."""
        self._host.finish()
        self._host.let_go(self._sharding.remove())
