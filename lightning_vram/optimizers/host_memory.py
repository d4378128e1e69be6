"""Check that a host has the memory that a run needs, before it is allocated: the kernel kills processes otherwise."""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.host.memory import OffloadError, margin_bytes
from lightning_vram.core.ranks import gather_objects
from lightning_vram.memory.host import available_host_bytes, free_swap_bytes, machine_name
from lightning_vram.memory.units import format_bytes
from lightning_vram.optimizers.moment_forms import StateForm, find_layout, is_elementwise
from lightning_vram.optimizers.step_round import why_not_steppable
from lightning_vram.private_names.fsdp2 import local_shard


def count_host_needs(
    module: nn.Module,
    num_shards: int,
    low_precision: Collection[str] = (),
    low_dtype: torch.dtype | None = None,
    averages: Iterable[nn.Module] = (),
) -> dict[str, int]:
    """Return the bytes that one of ``num_shards`` ranks will have of an unsharded module between steps, by kind.

    Without optimizer state. ``low_precision``: names of parameters with a copy of ``low_dtype``. ``averages``: whole
    ones, to be sharded.
    """
    weights = copies = gradients = 0
    for name, parameter, numel in _iterate_shards(module, num_shards):
        weights += numel * parameter.itemsize
        gradients += numel * parameter.itemsize if parameter.requires_grad else 0
        is_bf16 = (parameter.dtype, low_dtype) == (torch.float32, torch.bfloat16)
        is_split = is_bf16 and not parameter.requires_grad  # as frozen ones always are
        if low_dtype not in (None, parameter.dtype) and name in low_precision and not is_split:
            copies += numel * low_dtype.itemsize
    averaged = sum(numel * p.itemsize for one in averages for _, p, numel in _iterate_shards(one, num_shards))
    return {"weights": weights, "16-bit copies": copies, "gradients": gradients, "averages of weights": averaged}


def count_state_bytes(
    optimizers: Iterable[Optimizer], shards: Mapping[nn.Parameter, nn.Parameter], form: StateForm | None = None
) -> int:
    """Count optimizer state of trained weights on this rank; 0 for unknown classes."""
    known = [one for one in optimizers if why_not_steppable(one) is None and is_elementwise(type(one))]
    num_bytes = 0
    for optimizer, group in ((one, group) for one in known for group in one.param_groups):
        found = [shards.get(parameter, parameter) for parameter in group["params"]]
        trained = [parameter for parameter in found if parameter.requires_grad]
        for dtype in {parameter.dtype for parameter in trained}:
            layout = replace(find_layout(optimizer, group, dtype), form=form if dtype == torch.float32 else None)
            sizes = (local_shard(parameter).numel() for parameter in trained if parameter.dtype == dtype)
            num_bytes += sum(sum(layout.stored_bytes(size)) for size in sizes)
    return num_bytes


def _iterate_shards(module: nn.Module, num_shards: int) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield names and parameters that will be sharded, and the elements of a shard."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or not parameter.dim() or not parameter.numel():
            continue  # scalars stay on the device
        yield name, parameter, math.ceil(parameter.shape[0] / num_shards) * (parameter.numel() // parameter.shape[0])


class HostMemory:
    """Free host memory of this rank, measured now: all ranks create one before any allocates.

    Memory of ``module``, ``averages`` and the states of earlier ``optimizers`` counts as free: shards replace it.
    ``may_swap``: swap counts, too, as nothing is pinned.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        averages: Iterable[nn.Module] = (),
        *,
        may_swap: bool,
    ) -> None:
        available = available_host_bytes()
        self._available = available + free_swap_bytes() if available is not None and may_swap else available
        of_module = (p for one in (module, *averages) for p in one.parameters() if not isinstance(p, DTensor))
        states = (state for one in optimizers for state in one.state.values() if isinstance(state, Mapping))
        of_states = (local_shard(value) for state in states for value in state.values())
        held = (t for t in (*of_module, *of_states) if isinstance(t, Tensor) and t.device.type == "cpu")
        self._held = sum(tensor.nbytes for tensor in held)

    def check(self, needs: Mapping[str, int], name: str) -> None:
        """Refuse needs, in bytes by kind, that exceed the machine of any rank. A collective."""
        machines = defaultdict(list)
        for machine, of_rank in gather_objects((machine_name(), (needs, self._available, self._held))):
            machines[machine].append(of_rank)
        for (host, *_), ranks in machines.items():
            all_needs, available, held = zip(*ranks, strict=True)
            if None in available:
                continue
            free = min(available) + sum(held)
            sizes = {kind: sum(one[kind] for one in all_needs) for kind in needs}
            total = sum(sizes.values())
            margin = margin_bytes(total - sum(held))
            if total + margin > free:
                where = f"{host} for its {len(ranks)} ranks" if len(ranks) > 1 else host
                kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items() if size)
                raise OffloadError(
                    f"{name} needs {format_bytes(total)} of host memory on {where}: {kinds}. Available are "
                    f"{format_bytes(free)}, including the memory of the module, of which {format_bytes(margin)} must "
                    "stay free. Set nvme_path='/a/fast/disk' (moves the optimizer state there), host_state='bf16', "
                    "'8bit' or '4bit', master='split' or precision='bf16-true', or use more machines."
                )
