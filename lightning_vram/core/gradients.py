"""Scale, clip, average and reduce gradients, also sparse and sharded ones. May import: memory.

A backward that may run out of memory must not reduce anything: the other ranks would wait for the rest. So it runs
under ``ddp.no_sync()``, with the buffers broadcast before, and :func:`reduce_gradients` averages when all ranks have
finished: bitwise as the reducer with two ranks, with more up to the order of the sum. It overlaps with nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.private_names.ddp import (
    can_sync_buffers,
    delays_reductions,
    forget_used_parameters,
    has_optimizer_in_backward,
    is_reduced_by_compiler,
    logged_by,
)
from lightning_vram.private_names.ddp import sync_buffers as broadcast_buffers
from lightning_vram.private_names.dispatcher import copy_each, multiply_each, norm_each, order_by_group
from lightning_vram.private_names.fsdp2 import (
    local_shard,
)
from lightning_vram.private_names.torch import sparse_values

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel


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
    """Average ``gradients``, alike on all ranks, over ``group``, in place, with at most two buckets. A collective."""
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
    """Average a sparse ``gradient`` over ``group``, in place, on any backend, in the order of ranks. A collective."""
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


@torch.no_grad()
def reduce_gradients(ddp: DistributedDataParallel) -> None:
    """Average the gradients of backwards under ``ddp.no_sync()`` over the ranks, in place. A collective.

    Parameters without a gradient on some ranks count as zero there; without any they stay so. The host blocks once.
    """
    group = ddp.process_group
    if dist.get_world_size(group) > 1:
        dense = _agreed_gradients(list(_parameters(ddp)), group)
        average_dense(dense, group)
    # The reducer notes which parameters were used in backwards without it, too, and would take them for used in the
    # next that it reduces. With unused parameters it builds no buckets anew, so there is nothing else to lose.
    if ddp.find_unused_parameters:
        forget_used_parameters(ddp)


def why_reducer_is_needed(ddp: DistributedDataParallel) -> str | None:
    """Name what :func:`reduce_gradients` cannot replace, to follow "does not work with"; or ``None``."""
    reasons = {
        "static_graph=True, which fails in a first backward under no_sync": ddp.static_graph,
        "a communication hook": bool(logged_by(ddp).get("comm_hook")),
        "DistributedDataParallel(mixed_precision)": ddp.mixed_precision is not None,
        "delayed reductions": delays_reductions(ddp),
        "a hook for buffers": hasattr(ddp, "buffer_hook"),
        "the reducer of compiled autograd": is_reduced_by_compiler(ddp),
        "an optimizer that runs in the backward": has_optimizer_in_backward(_parameters(ddp)),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast the buffers from rank 0 now, as the next forward of ``ddp`` would, and keep forwards from doing it.

    Call it once before the tries of a step, :func:`expect_buffer_sync` after: a retry on one rank would hang.
    """
    if not can_sync_buffers(ddp) or not hasattr(ddp, "require_forward_param_sync"):
        return
    if ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
        broadcast_buffers(ddp)
    ddp.require_forward_param_sync = False


def expect_buffer_sync(ddp: DistributedDataParallel) -> None:
    """Let the next forward or :func:`sync_buffers` broadcast again, as after a synchronised backward."""
    ddp.require_forward_param_sync = True


def has_collectives_in_forward(module: nn.Module, *, is_training: bool = True) -> str | None:
    """Name what in ``module`` communicates in every forward or backward, so that ranks must run as many."""
    if not (dist.is_available() and dist.is_initialized()):
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
    """Average sparse gradients, and return the dense ones: of the same parameters on all ranks."""
    # As a generator: a list would hold sparse gradients while their dense form is made.
    gradients = (parameter.grad for parameter in parameters)
    kinds = [
        (grad is not None and not grad.is_sparse, grad.sparse_dim() if grad is not None and grad.is_sparse else 0)
        for grad in gradients
    ]
    flags = torch.tensor(kinds, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    dense = []
    for parameter, (is_dense, sparse_dim) in zip(parameters, flags.tolist(), strict=True):
        if is_dense:
            dense.append(_make_dense(parameter))
        elif sparse_dim:
            if parameter.grad is None:
                parameter.grad = sparse_zeros(parameter, sparse_dim)
            average_sparse(parameter.grad, group)
    return dense


def _make_dense(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None), requires_grad=False)
    elif parameter.grad.is_sparse:  # on this rank only
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


class GradientState:
    """Gradients to restore in the same tensors. Copies are on their device, or on the host if its memory is short."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(dict.fromkeys(parameters))
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._copies = _copy_all([gradient for gradient in self._gradients if gradient is not None])

    def restore(self) -> None:
        """Go back. May be called again, after each further try."""
        with torch.no_grad():
            copies = iter(self._copies)
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
                if gradient is not None:
                    local_shard(gradient).copy_(next(copies))


def _copy_all(gradients: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        try:
            return [local_shard(gradient).detach().clone() for gradient in gradients]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside of the handler: the error holds on to the copies made so far.
        return [local_shard(gradient).detach().to("cpu", copy=True) for gradient in gradients]
