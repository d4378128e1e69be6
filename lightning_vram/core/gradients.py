"""Scale, clip, average and reduce gradients, also sharded ones. May import: memory.

A backward that may run out of memory must not reduce anything: the other ranks would wait for the rest. So it runs
under ``ddp.no_sync()``, with the buffers broadcast before, and :func:`reduce_gradients` averages when all ranks have
finished: bitwise as the reducer with two ranks, with more up to the order of the sum. It overlaps with nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from lightning_vram.private_names.ddp import forget_used_parameters, special_reductions
from lightning_vram.private_names.ddp import sync_buffers as broadcast_buffers
from lightning_vram.private_names.dispatcher import copy_each, multiply_each, norm_each, order_by_group
from lightning_vram.private_names.fsdp2 import local_shard
from lightning_vram.private_names.torch import sparse_values


def scale_gradients(parameters: Iterable[Tensor], factor: float | Tensor) -> None:
    """Multiply the gradients of ``parameters``, each once, in place: shards, sparse ones, on several devices, too."""
    gradients = {id(parameter): parameter.grad for parameter in parameters if parameter.grad is not None}
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients.values():
        values = _values(gradient)
        by_device.setdefault(values.device, []).append(values)
    for device, tensors in by_device.items():
        multiply_each(tensors, factor.to(device) if isinstance(factor, Tensor) else factor)


def _values(gradient: Tensor) -> Tensor:
    """Return the memory of a gradient: of this rank, and without zeros that are not stored."""
    values: Tensor = local_shard(gradient.detach())
    if values.layout is torch.sparse_coo:
        return sparse_values(values)
    return values if values.layout is torch.strided else values.values()


_HALF_DTYPES = (torch.bfloat16, torch.float16)


def clip_gradient_norm(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients to a common 2-norm of at most ``max_norm``; return the norm before, in float32 or float64.

    ``clip_grad_norm_`` of torch computes in the dtype of the gradients: in bf16 with an error of half a percent.
    """
    gradients = _gradients_of(parameters)
    if not gradients:
        return torch.tensor(0.0)
    device = gradients[0].device
    norms: list[Tensor] = [
        torch.linalg.vector_norm(gradient, dtype=torch.float32 if gradient.dtype in _HALF_DTYPES else None).to(device)
        for gradient in gradients
    ]
    dtype = torch.float64 if any(norm.dtype is torch.float64 for norm in norms) else torch.float32
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(dtype) for norm in norms]))
    factor = clip_factor(norm, max_norm)
    for gradient in gradients:
        if gradient.dtype in _HALF_DTYPES:  # a 16-bit product would round the factor first
            gradient.copy_(gradient.float().mul_(factor.to(gradient.device)))
        else:
            gradient.mul_(factor.to(gradient.device))
    return norm


def sharded_norm(parameters: Iterable[Tensor], local: Callable[[Tensor], Tensor] = local_shard) -> Tensor:
    """Return the common 2-norm of all gradients, the same on every rank. A collective, unless nothing is sharded.

    Shards are of the last dimension of one mesh. ``local`` returns the local part of a gradient.
    """
    gradients = _gradients_of(parameters)
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if not sharded or sharded[0].device_mesh.size() == 1:
        return _total_norm(gradients, local)
    mesh = sharded[0].device_mesh
    dimension = next(i for i, place in enumerate(sharded[0].placements) if isinstance(place, Shard))
    total = _total_norm(sharded, local).double().square()
    dist.all_reduce(total, group=mesh.get_group(dimension))
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            total += torch.linalg.vector_norm(gradient).to(total.device).double().square()
    return total.sqrt().float()


def norm_part(gradient: Tensor) -> Tensor:
    """Return the 2-norm of a gradient, for :func:`join_norms`; of a shard, that of this rank's part."""
    part: Tensor = norm_each([gradient])[0] if isinstance(gradient, DTensor) else get_total_norm([gradient])
    return part


def join_norms(parts: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients from their norms, bitwise that of ``get_total_norm``. A collective if sharded."""
    if not isinstance(parts[0], DTensor):
        return get_total_norm(list(parts))
    norm: Any = torch.linalg.vector_norm(torch.stack(order_by_group(list(parts))))
    return norm.full_tensor()  # type: ignore[no-any-return]


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor for gradients of this norm, as in ``torch.nn.utils.clip_grads_with_norm_``."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


@torch.no_grad()
def apply_clip_factor(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply plain gradients by what :func:`clip_factor` returned, in place."""
    if factor.device.type == "cpu" and factor == 1:
        return  # as most often; it would take a third of the time of a step
    for device in {gradient.device: None for gradient in gradients}:
        multiply_each([gradient for gradient in gradients if gradient.device == device], factor.to(device))


@torch.no_grad()
def clip_sharded_values(parameters: Iterable[Tensor], limit: float) -> None:
    """Clip every element of the gradients to ``[-limit, limit]``, in place."""
    for gradient in _gradients_of(parameters):
        local_shard(gradient).clamp_(-limit, limit)


def _gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _total_norm(gradients: Sequence[Tensor], local: Callable[[Tensor], Tensor]) -> Tensor:
    if local is local_shard or not gradients:
        return get_total_norm([local_shard(gradient) for gradient in gradients])
    norms: list[Tensor] = [torch.linalg.vector_norm(local(gradient)) for gradient in gradients]
    device = norms[0].device
    norm: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in order_by_group(norms)]))
    return norm


_BUCKET_BYTES = 25 * 2**20  # the reducer's of DistributedDataParallel


def average_dense(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Average ``gradients``, alike on all ranks, over ``group``, in place, in buckets. A collective."""
    for bucket in _buckets(gradients):
        first = bucket[0]
        is_one = len(bucket) == 1 and first.is_contiguous()
        flat = first if is_one else first.new_empty(sum(gradient.numel() for gradient in bucket))
        parts = torch.split(flat.view(-1), [gradient.numel() for gradient in bucket])
        views = [part.view(gradient.shape) for part, gradient in zip(parts, bucket, strict=True)]
        if not is_one:
            copy_each(views, bucket)
        flat.mul_(1 / dist.get_world_size(group))  # before the sum, as the reducer does: half types do not overflow
        dist.all_reduce(flat, group=group)
        if not is_one:
            copy_each(bucket, views)


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


@torch.no_grad()
def reduce_gradients(ddp: DistributedDataParallel) -> None:
    """Average the gradients of backwards under ``ddp.no_sync()`` over the ranks, in place. A collective.

    Parameters without a gradient on some ranks count as zero there; without any they stay so. The host blocks once.
    """
    if dist.get_world_size(ddp.process_group) > 1:
        average_dense(_agreed_gradients(list(_parameters(ddp)), ddp.process_group), ddp.process_group)
    # The reducer notes which parameters were used in backwards without it, too, and would take them for used in the
    # next that it reduces. With unused parameters it builds no buckets anew, so there is nothing else to lose.
    if ddp.find_unused_parameters:
        forget_used_parameters(ddp)


def why_reducer_is_needed(ddp: DistributedDataParallel) -> str | None:
    """Name what :func:`reduce_gradients` cannot replace, to follow "does not work with"; or ``None``."""
    reasons = {
        "static_graph=True, which fails in a first backward under no_sync": ddp.static_graph,
        "DistributedDataParallel(mixed_precision)": ddp.mixed_precision is not None,
        "a hook for buffers": hasattr(ddp, "buffer_hook"),
        **special_reductions(ddp, _parameters(ddp)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast the buffers from rank 0 now, as the next forward of ``ddp`` would, and keep forwards from doing it.

    Call it once before the tries of a step, :func:`expect_buffer_sync` after: a retry on one rank would hang.
    """
    if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        broadcast_buffers(ddp)
    ddp.require_forward_param_sync = False


def expect_buffer_sync(ddp: DistributedDataParallel) -> None:
    """Let the next forward or :func:`sync_buffers` broadcast again, as after a synchronised backward."""
    ddp.require_forward_param_sync = True


def has_collectives_in_forward(module: nn.Module, *, is_training: bool = True) -> str | None:
    """Name what in ``module`` communicates in every forward or backward, so that ranks must run as many."""
    if not dist.is_initialized():
        return None
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        return "FSDP2 modules"
    if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
        return "FSDP1 modules"
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return "DTensor parameters, as of tensor parallelism"
    norms = [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]
    if is_training and any(dist.get_world_size(norm.process_group) > 1 for norm in norms):
        return "SyncBatchNorm"
    return None


def _parameters(ddp: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """Yield those the reducer manages, each once, in the same order on all ranks."""
    seen: set[nn.Parameter] = set()
    for module_name, module in ddp.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            # The reducer asks by this very name: of a parameter of the root, it begins with a dot and is not ignored.
            is_ignored = f"{module_name}.{name}" in ddp.parameters_to_ignore
            if parameter.requires_grad and not is_ignored and parameter not in seen:
                seen.add(parameter)
                yield parameter


def _agreed_gradients(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the gradients of the same parameters on all ranks: zeros where only others have one."""
    kinds = [(one.grad is not None, one.grad is not None and one.grad.is_sparse) for one in parameters]
    flags = torch.tensor(kinds, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    has_gradient, is_sparse = flags.T.tolist()
    if any(is_sparse):  # on all ranks alike
        shape = list(parameters[is_sparse.index(1)].shape)
        raise ValueError(
            f"MicroBatching cannot average sparse gradients after the backward, such as that of the parameter {shape}. "
            "Use sparse=False, or a fixed size, such as MicroBatching(8), without weight= and find_unused_parameters."
        )
    used = [one for one, is_used in zip(parameters, has_gradient, strict=True) if is_used]
    for one in used:
        if one.grad is None:
            one.grad = torch.zeros_like(one, dtype=getattr(one, "grad_dtype", None), requires_grad=False)
    return [one.grad for one in used if one.grad is not None]
