"""Check that a host has the memory that a run needs, before it is allocated: the kernel kills processes otherwise."""

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.host.memory import MARGIN_BYTES, OffloadError
from lightning_vram.core.ranks import gather_objects
from lightning_vram.memory.host import available_host_bytes, free_swap_bytes, machine_name
from lightning_vram.memory.units import format_bytes
from lightning_vram.optimizers.moment_forms import FORMS, StateForm, find_layout, is_elementwise
from lightning_vram.optimizers.step_round import why_not_steppable
from lightning_vram.private_names.fsdp2 import local_shard

_NO_FORMS = (0,) * len(FORMS)
_KINDS = {  # fields of HostNeeds, and their names in messages
    "weights": "weights",
    "low_precision_copies": "16-bit copies",
    "gradients": "gradients",
    "states": "optimizer state",
    "averages": "averages of weights",
}


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of host memory between steps."""

    weights: int = 0  # the shards
    low_precision_copies: int = 0  # 16-bit copies for transfers
    gradients: int = 0  # of trained weights
    states: int = 0  # of optimizers of known classes; 0 before they exist
    averages: int = 0  # of weights, for a callback
    can_be_16_bit: bool = True  # all weights have 32 bits: 16 bits would halve everything
    can_be_split: bool = False  # split weights would need no copies
    low_precision_states: tuple[int, ...] = _NO_FORMS  # states in each form of moments; 0 if unsupported

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(int(getattr(self, kind)) for kind in _KINDS)

    def __add__(self, other: "HostNeeds") -> "HostNeeds":
        """Add another rank."""
        return HostNeeds(
            **{kind: getattr(self, kind) + getattr(other, kind) for kind in _KINDS},
            can_be_16_bit=self.can_be_16_bit and other.can_be_16_bit,
            can_be_split=self.can_be_split or other.can_be_split,
            low_precision_states=tuple(map(operator.add, self.low_precision_states, other.low_precision_states)),
        )


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
    needs = HostNeeds(
        averages=sum(
            numel * parameter.itemsize for one in averages for _, parameter, numel in _iterate_shards(one, num_shards)
        ),
        can_be_16_bit=all(p.dtype == torch.float32 for p in module.parameters()),
    )
    for name, parameter, numel in _iterate_shards(module, num_shards):
        num_bytes = numel * parameter.itemsize
        has_copy = low_dtype is not None and low_dtype != parameter.dtype and name in low_precision
        if (parameter.dtype, low_dtype) == (torch.float32, torch.bfloat16) and not parameter.requires_grad:
            has_copy = False  # frozen ones are split
        needs += HostNeeds(
            weights=num_bytes,
            low_precision_copies=numel * low_dtype.itemsize if has_copy and low_dtype is not None else 0,
            gradients=num_bytes if parameter.requires_grad else 0,
            can_be_split=has_copy and low_dtype == torch.bfloat16,
        )
    return needs


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


_DISK, _IN_BF16 = "nvme_path='/a/fast/disk'", "precision='bf16-true'"


def margin_bytes(taken_bytes: int) -> int:
    """Return what must stay free: as much again for small models, so that a toy runs on a full machine."""
    return min(MARGIN_BYTES, max(0, taken_bytes))


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

    def check(self, needs: HostNeeds, name: str, *, has_disk: bool, is_spread: bool) -> None:
        """Refuse needs that exceed the machine of any rank. A collective.

        ``is_spread``: with more ranks each would need less.
        """
        machines: dict[tuple[str, ...], _Machine] = {}
        for key, of_rank in gather_objects((machine_name(), _Machine(needs, self._available, self._held))):
            machines[key] = machines[key] + of_rank if key in machines else of_rank
        for (host, *_), machine in machines.items():
            if not machine.fits(needed := machine.needs):
                ranks = f" for its {machine.num_ranks} ranks" if machine.num_ranks > 1 else ""
                fitting = machine.list_fitting(has_disk=has_disk, num_machines=len(machines) if is_spread else None)
                sizes = {name: getattr(needed, kind) for kind, name in _KINDS.items()}
                kinds = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
                settings = ", or with ".join(fitting)
                advice = "No setting would make it fit: use a machine with more memory, or a smaller model."
                advice = f"It would fit with {settings}." if settings else advice
                raise OffloadError(
                    f"{name} needs {format_bytes(needed.total)} of host memory on {host}{ranks}: "
                    f"{kinds}. Available are {format_bytes(machine.free)}, including the memory of the "
                    f"module, of which {format_bytes(machine.margin(needed))} must stay free. {advice}"
                )


@dataclass(frozen=True)
class _Machine:
    """Needs and free memory of the ranks of a machine."""

    needs: HostNeeds  # sum over the ranks
    available: int | None  # free for all of them; ``None``: unknown
    held: int  # of their modules
    num_ranks: int = 1

    def __add__(self, other: "_Machine") -> "_Machine":
        known = [one.available for one in (self, other) if one.available is not None]
        available = min(known) if len(known) == 2 else None
        num_ranks = self.num_ranks + other.num_ranks
        return _Machine(self.needs + other.needs, available, self.held + other.held, num_ranks)

    @property
    def free(self) -> int:
        return (self.available or 0) + self.held

    def margin(self, needs: HostNeeds) -> int:
        return margin_bytes(needs.total - self.held)

    def fits(self, needs: HostNeeds) -> bool:
        return self.available is None or needs.total + self.margin(needs) <= self.free

    def list_fitting(self, *, has_disk: bool, num_machines: int | None) -> Iterator[str]:
        """Yield settings that would fit, with their needs."""
        on_disk = [(_DISK, replace(self.needs, states=0))] if self.needs.states and not has_disk else []
        choices = [*on_disk, *_list_leaner(self.needs, has_disk=has_disk)]
        if self.needs.can_be_16_bit:
            choices.append((_IN_BF16, _halve(self.needs)))
            choices += [(f"{_DISK} and {_IN_BF16}", _halve(needs)) for _, needs in on_disk]
        for setting, needs in choices:
            if self.fits(needs):
                yield f"{setting} ({format_bytes(needs.total)})"
        usable = (self.available or 0) - MARGIN_BYTES
        if num_machines is not None and usable > 0:
            yield f"{math.ceil(self.needs.total * num_machines / usable)} such machines, each with as many ranks"


def _list_leaner(needs: HostNeeds, *, has_disk: bool) -> Iterator[tuple[str, HostNeeds]]:
    """Yield settings with smaller weights or states: bit-exact ones first."""
    wholes = {"": needs}
    if needs.can_be_split:
        split = replace(needs, low_precision_copies=0)
        wholes["master='split'"] = split
        yield "master='split'", split
    for name, states in zip(FORMS, needs.low_precision_states, strict=True):
        if 0 < states < needs.states and not has_disk:
            for setting, whole in wholes.items():
                yield " and ".join(filter(None, (setting, f"host_state={name!r}"))), replace(whole, states=states)


def _halve(needs: HostNeeds) -> HostNeeds:
    """Return needs in 16 bits, except for averages, which are copied before the module is converted."""
    return HostNeeds(needs.weights // 2, 0, needs.gradients // 2, needs.states // 2, needs.averages)
