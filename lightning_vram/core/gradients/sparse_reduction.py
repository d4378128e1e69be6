"""Average a sparse gradient over ranks, each of which has other rows."""

import torch
import torch.distributed as dist
from torch import Tensor


def sparse_zeros(like: Tensor, sparse_dim: int) -> Tensor:
    """Return a sparse tensor without entries.

    Args:
        like: Tensor of any layout, for shape, type and device.
        sparse_dim: Number of leading dimensions that are indexed: 1 for rows.
    """
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=like.device)
    values = torch.empty(0, *like.shape[sparse_dim:], dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False)


def average_sparse(gradient: Tensor, group: dist.ProcessGroup) -> None:
    """Average ``gradient`` over ``group``, in place, on any backend. A collective.

    Everybody's rows are sent to everybody, as many as the rank with the most has; they are added in the order of the
    ranks, as gloo does it for ``DistributedDataParallel``.

    Args:
        gradient: Sparse COO tensor of the same shape on all ranks.
        group: Ranks to average over.

    Raises:
        RuntimeError: If the backend fails.
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
