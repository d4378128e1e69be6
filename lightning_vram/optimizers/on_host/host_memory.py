"""Check that a host has the memory that a run needs, before it is allocated: the kernel kills processes otherwise."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.host.memory import MARGIN_BYTES, OffloadError, margin_bytes
from lightning_vram.core.ranks import gather_objects
from lightning_vram.memory.host import available_host_bytes, free_swap_bytes, machine_name
from lightning_vram.memory.units import format_bytes
from lightning_vram.optimizers.moment_forms import FORMS, StateForm, find_layout, is_elementwise
from lightning_vram.optimizers.step_round import why_not_steppable
from lightning_vram.private_names.fsdp2 import local_shard

_KINDS = {  # fields of HostNeeds, and their names in messages
    "weights": "weights",
    "low_precision_copies": "16-bit copies",
    "gradients": "gradients",
    "states": "optimizer state",
    "averages": "averages of weights",
}


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of host memory of a rank between steps."""

    weights: int = 0  # the shards
    low_precision_copies: int = 0  # 16-bit copies for transfers
    gradients: int = 0  # of trained weights
    states: int = 0  # of optimizers of known classes; 0 before they exist
    averages: int = 0  # of weights, for a callback
    can_be_16_bit: bool = True  # all weights have 32 bits: 16 bits would halve everything
    can_be_split: bool = False  # split weights would need no copies
    low_precision_states: tuple[int, ...] = (0,) * len(FORMS)  # states in each form of moments; 0 if unsupported

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(int(getattr(self, kind)) for kind in _KINDS)

    @property
    def savings(self) -> "Counter[str]":
        """Bytes that each setting would save, bit-exact ones first; none for optimizer state that is on a disk."""
        forms = zip(FORMS, self.low_precision_states, strict=True)
        saved = Counter({"nvme_path='/a/fast/disk'": self.states})
        if self.can_be_split:
            saved["master='split'"] = self.low_precision_copies
        saved.update({f"host_state={name!r}": self.states - states for name, states in forms if states})
        if self.can_be_16_bit:  # averages are copied before the module is converted
            halved = (self.weights + self.gradients + self.states) // 2
            saved["precision='bf16-true'"] = halved + self.low_precision_copies
        return saved


def count_host_needs(
    module: nn.Module,
    num_shards: int,
    low_precision: Collection[str] = (),
    low_dtype: torch.dtype | None = None,
    averages: Iterable[nn.Module] = (),
) -> HostNeeds:
    """Count what one of ``num_shards`` ranks will have of an unsharded module, without optimizer state.

    ``low_precision``: names of parameters with a copy of ``low_dtype``. ``averages``: whole ones, to be sharded.
    """
    weights = copies = gradients = 0
    for name, parameter, numel in _iterate_shards(module, num_shards):
        weights += numel * parameter.itemsize
        gradients += numel * parameter.itemsize if parameter.requires_grad else 0
        is_bf16 = (parameter.dtype, low_dtype) == (torch.float32, torch.bfloat16)
        is_split = is_bf16 and not parameter.requires_grad  # as frozen ones always are
        if low_dtype not in (None, parameter.dtype) and name in low_precision and not is_split:
            copies += numel * low_dtype.itemsize
    return HostNeeds(
        weights,
        copies,
        gradients,
        averages=sum(
            numel * parameter.itemsize for one in averages for _, parameter, numel in _iterate_shards(one, num_shards)
        ),
        can_be_16_bit=all(p.dtype == torch.float32 for p in module.parameters()),
        can_be_split=low_dtype == torch.bfloat16 and copies > 0,
    )


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


def add_states(
    needs: HostNeeds,
    optimizers: Sequence[Optimizer],
    shards: Mapping[nn.Parameter, nn.Parameter],
    form: StateForm | None,
) -> HostNeeds:
    """Add optimizer state, and what it would be in other forms."""
    states = count_state_bytes(optimizers, shards, form)
    others = tuple(
        count_state_bytes(optimizers, shards, one) if needs.can_be_16_bit and all(map(one.fits, optimizers)) else 0
        for one in FORMS.values()
    )
    can_be_16_bit = needs.can_be_16_bit and form is None  # a form is for float32 weights
    return replace(needs, states=states, low_precision_states=others, can_be_16_bit=can_be_16_bit)


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

    def check(self, needs: HostNeeds, name: str, *, is_spread: bool) -> None:
        """Refuse needs that exceed the machine of any rank. A collective.

        ``is_spread``: with more ranks each would need less.
        """
        machines = defaultdict(list)
        for machine, of_rank in gather_objects((machine_name(), (needs, self._available, self._held))):
            machines[machine].append(of_rank)
        for (host, *_), ranks in machines.items():
            where = f"{host} for its {len(ranks)} ranks" if len(ranks) > 1 else host
            _check_machine(name, where, ranks, len(machines) if is_spread else None)


def _check_machine(
    name: str, where: str, ranks: Iterable[tuple[HostNeeds, int | None, int]], num_machines: int | None
) -> None:
    """Refuse the needs of the ranks of a machine; of each, what is available and what its module holds is known."""
    all_needs, available, held = zip(*ranks, strict=True)
    if None in available:
        return
    free = min(available) + sum(held)
    sizes = {kind: sum(getattr(needs, field) for needs in all_needs) for field, kind in _KINDS.items()}
    total = sum(sizes.values())

    def margin(needed: int) -> int:
        return margin_bytes(needed - sum(held))

    if total + margin(total) <= free:
        return
    saved: Counter[str] = sum((needs.savings for needs in all_needs), Counter())
    totals = {setting: total - num_bytes for setting, num_bytes in saved.items()}
    fitting = [f"{key} ({format_bytes(size)})" for key, size in totals.items() if size + margin(size) <= free]
    usable = min(available) - MARGIN_BYTES
    if num_machines is not None and usable > 0:
        fitting.append(f"{math.ceil(total * num_machines / usable)} such machines, each with as many ranks")
    advice = "No single setting would make it fit: use a machine with more memory, or a smaller model."
    advice = f"It would fit with {', or with '.join(fitting)}." if fitting else advice
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items() if size)
    raise OffloadError(
        f"{name} needs {format_bytes(total)} of host memory on {where}: {kinds}. Available are {format_bytes(free)}, "
        f"including the memory of the module, of which {format_bytes(margin(total))} must stay free. {advice}"
    )
