"""Use the gradients of ``DistributedDataParallel`` bucket by bucket, as they are reduced.

Hooks of a parameter run before its gradient is reduced. So a communication hook reduces, and hands gradients on: those
of a bucket while the next one is under way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.private_names.torch.distributed import drop_reduced_gradients, prepare_for_backward


class ReducedBuckets:
    """Stands in for the reduction of ``ddp``, for as long as that lives. Averages as it does, to the bit.

    Args:
        ddp: That has no communication hook yet.
        take: Gets a parameter with its gradient, and says whether it used it up. Others get theirs, which lies in the
            bucket, when the backward is over.

    Attributes:
        parameters: That it reduces.
        has_reduced: Whether a backward was reduced.
    """

    def __init__(self, ddp: DistributedDataParallel, take: Callable[[Any], bool]) -> None:
        self.parameters = {one for one in ddp.parameters() if one.requires_grad}
        self.has_reduced = False
        self._ddp = ddp
        self._take = take
        self._under_way: tuple[Any, list[Tensor], list[Tensor]] | None = None
        self._left: list[tuple[Tensor, Tensor]] = []
        # The reducer holds what it calls, out of sight of the collector of garbage.
        ddp.register_comm_hook(None, partial(_reduce, ref(self)))  # type: ignore[no-untyped-call]
        drop_reduced_gradients(ddp)

    def land(self) -> None:
        """Wait for the last bucket, and let all that nobody took have their gradients."""
        self._land()
        for parameter, gradient in self._left:
            parameter.grad = gradient
        self._left = []

    def expect_another(self) -> None:
        """Reduce the next backward, too, though no forward comes before it."""
        prepare_for_backward(self._ddp)

    def reduce(self, bucket: Any) -> Any:
        """Send a bucket on its way, and use the one before it. A collective."""
        self._land()
        flat, parameters = bucket.buffer(), bucket.parameters()
        for parameter in parameters:
            parameter.grad = None  # is in the bucket
        group = self._ddp.process_group
        flat.mul_(1 / dist.get_world_size(group))
        work = dist.all_reduce(flat, group=group, async_op=True)
        self._under_way = (work, parameters, bucket.gradients())
        return work.get_future().then(lambda future: future.value()[0])

    def _land(self) -> None:
        if self._under_way is None:
            return
        (work, parameters, gradients), self._under_way = self._under_way, None
        work.wait()
        self.has_reduced = True
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            if not self._take(parameter):
                parameter.grad = None
                self._left.append((parameter, gradient))


def _reduce(buckets: "ref[ReducedBuckets]", _: None, bucket: Any) -> Any:
    living = buckets()
    if living is None:
        raise RuntimeError("OptimizerInBackward was undone: wrap the module in a new DistributedDataParallel.")
    return living.reduce(bucket)
