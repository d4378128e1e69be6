"""Use the gradients of ``DistributedDataParallel`` bucket by bucket, as they are reduced."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.private_names.torch.distributed import drop_reduced_gradients, prepare_for_backward

Sent = tuple[Any, list[Tensor], list[Tensor]]  # pending reduction, parameters, and their gradients in the bucket


class ReducedBuckets:
    """Replaces the reduction of ``ddp`` by a bit-exact one in a communication hook.

    Hooks of parameters would run before the reduction. ``take`` gets a parameter with its gradient while the next
    bucket is reduced, and returns whether it used it; other parameters get theirs at the end of the backward.
    """

    def __init__(self, ddp: DistributedDataParallel, take: Callable[[Any], bool]) -> None:
        self.parameters = {one for one in ddp.parameters() if one.requires_grad}
        self.has_reduced = False
        self._ddp = ddp
        self._take = take
        self._under_way: Sent | None = None
        self._left: list[tuple[Tensor, Tensor]] = []
        living = ref(self)  # the reducer holds its hook, invisible to the garbage collector
        ddp.register_comm_hook(None, lambda _, bucket: _reduce(living(), bucket))
        drop_reduced_gradients(ddp)

    def land(self) -> None:
        """Wait for the last bucket, and set the gradients that were not used."""
        last, self._under_way = self._under_way, None
        self._use(last)
        for parameter, gradient in self._left:
            parameter.grad = gradient
        self._left = []

    def expect_another(self) -> None:
        """Reduce the next backward, which has no forward of its own."""
        prepare_for_backward(self._ddp)

    def reduce(self, bucket: Any) -> Any:
        """Begin to reduce a bucket, and use the one before it. A collective."""
        flat, parameters, group = bucket.buffer(), bucket.parameters(), self._ddp.process_group
        for parameter in parameters:
            parameter.grad = None  # is in the bucket
        flat.mul_(1 / dist.get_world_size(group))
        work = dist.all_reduce(flat, group=group, async_op=True)
        before, self._under_way = self._under_way, (work, parameters, bucket.gradients())
        self._use(before)
        return work.get_future().then(lambda future: future.value()[0])

    def _use(self, bucket: Sent | None) -> None:
        if bucket is None:
            return
        work, parameters, gradients = bucket
        work.wait()
        self.has_reduced = True
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            if not self._take(parameter):
                parameter.grad = None
                self._left.append((parameter, gradient))


def _reduce(buckets: ReducedBuckets | None, bucket: Any) -> Any:
    if buckets is None:
        raise RuntimeError("OptimizerInBackward was undone: wrap the module in a new DistributedDataParallel.")
    return buckets.reduce(bucket)
