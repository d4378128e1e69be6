"""``DistributedDataParallel`` without its reducer, which is C++ that reads pointers: the buckets it holds instead."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn

from lightning_vram.memory.units import MIB
from lightning_vram.private_names.lightning.strategies import ddp_arguments

_FIRST_BYTES = MIB  # of the bucket that is full first
_BUCKET_MIB = 25


def leave_out_reducer(strategy: Strategy, label: Callable[[Sequence[Tensor]], None]) -> None:
    """Let a strategy of DDP hold the buckets of its gradients, and wrap nothing; others are left as they are."""
    if isinstance(strategy, DDPStrategy):
        strategy.configure_ddp = partial(_hold_buckets, strategy, label)  # type: ignore[method-assign]


def _hold_buckets(strategy: DDPStrategy, label: Callable[[Sequence[Tensor]], None]) -> None:
    module, arguments = strategy.lightning_module, ddp_arguments(strategy)
    assert module is not None  # the strategy has connected it
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = _assign(reversed(parameters), arguments.get("bucket_cap_mb"))
    buckets = [group[0].new_zeros(sum(one.numel() for one in group)) for group in groups]
    label(buckets)
    strategy.ddp_buckets = buckets  # type: ignore[attr-defined]  # as long as it
    if arguments.get("gradient_as_bucket_view"):
        for bucket, group in zip(buckets, groups, strict=True):
            for view, parameter in zip(torch.split(bucket, [one.numel() for one in group]), group, strict=True):
                move = partial(_move_into, view.view_as(parameter))
                parameter.register_post_accumulate_grad_hook(move)  # type: ignore[no-untyped-call]


def _move_into(view: Tensor, parameter: nn.Parameter) -> None:
    if parameter.grad is not None and parameter.grad is not view:
        view.copy_(parameter.grad)
        parameter.grad = view


def _assign(parameters: Iterable[nn.Parameter], cap_mib: float | None) -> list[list[nn.Parameter]]:
    """Fill buckets in the order in which gradients are there, each of one dtype, until they have so many bytes."""
    first_bytes = _FIRST_BYTES if cap_mib is None else int(cap_mib * MIB)
    cap_bytes = int((cap_mib or _BUCKET_MIB) * MIB)
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        bucket = filling.setdefault(parameter.dtype, [])
        bucket.append(parameter)
        if sum(one.nbytes for one in bucket) >= (cap_bytes if full else first_bytes):
            full.append(filling.pop(parameter.dtype))
    return [*full, *filling.values()]
