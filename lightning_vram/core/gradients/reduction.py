"""Do by hand what ``DistributedDataParallel`` does between ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.core.gradients.averaging import average_dense, average_sparse, sparse_zeros
from lightning_vram.private_names.torch.distributed import (
    can_sync_buffers,
    delays_reductions,
    forget_used_parameters,
    has_optimizer_in_backward,
    is_reduced_by_compiler,
    logged_by,
)
from lightning_vram.private_names.torch.distributed import sync_buffers as broadcast_buffers

if dist.is_available():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor


@torch.no_grad()
def reduce_gradients(ddp: DistributedDataParallel) -> None:
    """Average the gradients of backwards under ``ddp.no_sync()`` over the ranks, in place. A collective.

    A parameter with a gradient on some ranks only counts as zero on the others and has one everywhere afterwards; one
    without any stays without, as with ``find_unused_parameters``. The host blocks once.
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

    After a synchronised backward, the next forward begins with this collective; one that is run again after a failure
    on one rank only would wait for the others. So call it once before the tries of a step, :func:`expect_buffer_sync`
    after. Nothing is sent if the forward would send nothing, or if PyTorch changed its private names.
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
    """Name what in ``module`` talks to other ranks in every forward or backward.

    Ranks then have to run as many chunks as the others, and one that fails leaves the others waiting.
    """
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
    gradients = [parameter.grad for parameter in parameters]
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
