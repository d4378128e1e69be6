"""Average gradients over ranks: dense ones in buckets, sparse ones of which each rank has other rows."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_vram.private_names.torch.operators import copy_each

_BUCKET_BYTES = 25 * 2**20  # the reducer's of DistributedDataParallel


@dataclass
class _Bucket:
    """Gradients in one tensor, a copy or the only gradient itself, during their all-reduce."""

    gradients: list[Tensor]
    flat: Tensor
    work: "dist.Work"  # absent from builds without torch.distributed

    def land(self) -> None:
        self.work.wait()
        if self.flat is not self.gradients[0]:
            copy_each(self.gradients, _views(self.flat, self.gradients))


def average_dense(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Average ``gradients``, of the same shapes and order on all ranks, over ``group``, in place. A collective.

    Small ones are sent together; one that fills a bucket is sent as it is. At most two buckets are held: one is filled
    while the other is sent.
    """
    under_way: _Bucket | None = None
    for bucket in _buckets(gradients):
        following = _send(bucket, group)  # is filled while the one before is under way
        if under_way is not None:
            under_way.land()
        under_way = following
    if under_way is not None:
        under_way.land()


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group by type and device, in the reverse order, as a backward makes them."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    filled_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for gradient in reversed(gradients):
        kind = (gradient.dtype, gradient.device)
        if filled_bytes[kind] and filled_bytes[kind] + gradient.nbytes > _BUCKET_BYTES:
            yield open_buckets.pop(kind)
            filled_bytes[kind] = 0
        open_buckets.setdefault(kind, []).append(gradient)
        filled_bytes[kind] += gradient.nbytes
    yield from open_buckets.values()


def _send(gradients: list[Tensor], group: dist.ProcessGroup) -> _Bucket:
    first = gradients[0]
    if len(gradients) == 1 and first.is_contiguous():
        flat = first
    else:
        flat = first.new_empty(sum(gradient.numel() for gradient in gradients))
        copy_each(_views(flat, gradients), gradients)
    flat.mul_(1 / dist.get_world_size(group))  # before the sum, as the reducer does: half types do not overflow
    return _Bucket(gradients, flat, dist.all_reduce(flat, group=group, async_op=True))


def _views(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def sparse_zeros(like: Tensor, sparse_dim: int) -> Tensor:
    """Return a sparse tensor without entries like ``like``, with ``sparse_dim`` indexed dimensions: 1 for rows."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[sparse_dim:], dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def average_sparse(gradient: Tensor, group: dist.ProcessGroup) -> None:
    """Average a sparse ``gradient`` over ``group``, in place, on any backend. A collective.

    All rows are sent to all ranks, padded to the largest number of rows; they are added in the order of the ranks, as
    gloo does for ``DistributedDataParallel``.
    """
    mine = gradient.coalesce()
    world_size = dist.get_world_size(group)
    indices, values = mine.indices(), mine.values() * (1 / world_size)
    counts = [count.item() for count in _gather(torch.tensor([values.shape[0]], device=values.device), group)]
    most = int(max(counts))
    missing = most - values.shape[0]
    all_indices = _gather(torch.cat([indices, indices.new_zeros(indices.shape[0], missing)], dim=1), group)
    all_values = _gather(torch.cat([values, values.new_zeros(missing, *values.shape[1:])]), group)
    total = sparse_zeros(gradient, gradient.sparse_dim())
    for count, theirs, rows in zip(counts, all_indices, all_values, strict=True):
        total += torch.sparse_coo_tensor(theirs[:, : int(count)], rows[: int(count)], gradient.shape)
    gradient.copy_(total.coalesce())


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    everybodys = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybodys, tensor.contiguous(), group=group)
    return everybodys
