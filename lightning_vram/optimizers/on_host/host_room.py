"""Whether a host has the memory for what is to be at rest there: asked before any of it is taken.

The kernel kills a process that takes more than there is, and what is pinned cannot be swapped. Each rank counts what it
will have; the ranks of a machine share its memory. What the module has on the host now is counted once: its shards take
its place.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.host.arena import MARGIN_BYTES, OffloadError
from lightning_vram.core.processes.rank_errors import gather_objects
from lightning_vram.memory.host.available import available_host_bytes, free_swap_bytes
from lightning_vram.memory.host.machine import machine_name
from lightning_vram.memory.units import format_bytes
from lightning_vram.optimizers.on_disk import find_layout, is_elementwise
from lightning_vram.optimizers.stepping import FORMS, StateForm, why_not_steppable
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part

_DISK, _NARROW = "nvme_path='/a/fast/disk'", "precision='bf16-true'"
_NO_FORMS = (0,) * len(FORMS)


@dataclass(frozen=True)
class HostNeeds:
    """Bytes that will be at rest on the host, by kind.

    Attributes:
        weights: The shards.
        narrow_copies: Of them, which travel in 16 bit.
        gradients: Of those that are trained.
        states: Of the optimizers, as far as their classes are known; 0 while there are none.
        can_be_narrow: Whether all weights are in 32 bit, so that 16 bit would halve all of it.
        narrow_states: What states would take with fewer bytes for a moment; 0 where there is no such form.
    """

    weights: int = 0
    narrow_copies: int = 0
    gradients: int = 0
    states: int = 0
    can_be_narrow: bool = True
    narrow_states: tuple[int, ...] = _NO_FORMS

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.narrow_copies + self.gradients + self.states

    def __add__(self, other: "HostNeeds") -> "HostNeeds":
        """Add what another rank needs."""
        return HostNeeds(
            self.weights + other.weights,
            self.narrow_copies + other.narrow_copies,
            self.gradients + other.gradients,
            self.states + other.states,
            self.can_be_narrow and other.can_be_narrow,
            tuple(one + another for one, another in zip(self.narrow_states, other.narrow_states, strict=True)),
        )


def count_host_needs(
    module: nn.Module, num_shards: int, narrow: Collection[str] = (), narrow_dtype: torch.dtype | None = None
) -> HostNeeds:
    """Count what one rank will have of a module, without the states of its optimizers.

    Args:
        module: Before it is sharded; may be on ``meta``. What is sharded already is not counted.
        num_shards: Ranks that share a parameter.
        narrow: Names of the parameters of which there is a copy that travels.
        narrow_dtype: Of those copies; ``None``: there are none.
    """
    needs = HostNeeds(can_be_narrow=all(p.dtype == torch.float32 for p in module.parameters()))
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or not parameter.dim() or not parameter.numel():
            continue  # scalars are not sharded: they stay on the device
        numel = math.ceil(parameter.shape[0] / num_shards) * (parameter.numel() // parameter.shape[0])
        num_bytes = numel * parameter.itemsize
        has_copy = narrow_dtype is not None and narrow_dtype != parameter.dtype and name in narrow
        if (parameter.dtype, narrow_dtype) == (torch.float32, torch.bfloat16) and not parameter.requires_grad:
            has_copy = False  # frozen ones are split
        needs += HostNeeds(
            weights=num_bytes,
            narrow_copies=numel * narrow_dtype.itemsize if has_copy and narrow_dtype is not None else 0,
            gradients=num_bytes if parameter.requires_grad else 0,
        )
    return needs


def count_state_bytes(
    optimizers: Iterable[Optimizer], shards: Mapping[nn.Parameter, nn.Parameter], form: StateForm | None = None
) -> int:
    """Count what optimizers will keep on this rank for weights that are trained; 0 for classes that nobody has read.

    Args:
        optimizers: Before their first step.
        shards: That have taken the place of parameters.
        form: Of their moments.
    """
    return sum(sum(_iterate_states(one, shards, form)) for one in optimizers)


def add_states(
    needs: HostNeeds,
    optimizers: Sequence[Optimizer],
    shards: Mapping[nn.Parameter, nn.Parameter],
    form: StateForm | None,
) -> HostNeeds:
    """Return needs with the states of optimizers, and what those would be in another form; see above."""
    states = count_state_bytes(optimizers, shards, form)
    others = tuple(
        count_state_bytes(optimizers, shards, one) if needs.can_be_narrow and all(map(one.fits, optimizers)) else 0
        for one in FORMS.values()
    )
    return replace(
        needs, states=states, narrow_states=others, can_be_narrow=needs.can_be_narrow and form is None
    )  # a form is for float32 weights


class HostRoom:
    """What the host has for this rank, measured when this is made; all ranks make one before any takes something.

    Args:
        module: What it has on the host counts as there: it will be given back.
        optimizers: Of a run before, whose states will be.
        may_swap: Whether memory that is swapped out will do: none of it is pinned.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer] = (), *, may_swap: bool) -> None:
        available = available_host_bytes()
        self._available = available + free_swap_bytes() if available is not None and may_swap else available
        of_module = (p for p in module.parameters() if not isinstance(p, DTensor))
        states = (state for one in optimizers for state in one.state.values() if isinstance(state, Mapping))
        of_states = (local_part(value) for state in states for value in state.values())
        held = (t for t in (*of_module, *of_states) if isinstance(t, Tensor) and t.device.type == "cpu")
        self._held = sum(tensor.nbytes for tensor in held)

    def check(self, needs: HostNeeds, name: str, *, has_disk: bool, is_spread: bool) -> None:
        """Refuse what does not fit on the machine of any rank. A collective.

        Args:
            needs: Of this rank.
            name: Who needs it.
            has_disk: Whether states are on a disk already.
            is_spread: Whether more ranks would each have less.

        Raises:
            OffloadError: On all ranks alike, if a machine has not enough.
        """
        machines: dict[tuple[str, ...], _Machine] = {}
        for key, of_rank in gather_objects((machine_name(), _Machine(needs, self._available, self._held))):
            machines[key] = machines[key] + of_rank if key in machines else of_rank
        for (host, *_), machine in machines.items():
            if not machine.has_room_for(needed := machine.needs):
                fitting = machine.list_fitting(has_disk=has_disk, num_machines=len(machines) if is_spread else None)
                raise OffloadError(
                    f"{name} needs {format_bytes(needed.total)} of host memory on {host}{machine.ranks}: "
                    f"{_list_kinds(needed)}. There are {format_bytes(machine.room)}, with what the module has now, of "
                    f"which {format_bytes(machine.margin(needed))} must stay free. {_advise(fitting)}"
                )


@dataclass(frozen=True)
class _Machine:
    """What all ranks of a machine need there, and have.

    Attributes:
        needs: Sum over the ranks.
        available: What they can still take together; ``None``: nobody knows.
        held: What their modules have.
        num_ranks: How many they are.
    """

    needs: HostNeeds
    available: int | None
    held: int
    num_ranks: int = 1

    def __add__(self, other: "_Machine") -> "_Machine":
        known = [one.available for one in (self, other) if one.available is not None]
        available = min(known) if len(known) == 2 else None
        num_ranks = self.num_ranks + other.num_ranks
        return _Machine(self.needs + other.needs, available, self.held + other.held, num_ranks)

    @property
    def ranks(self) -> str:
        return f" for its {self.num_ranks} ranks" if self.num_ranks > 1 else ""

    @property
    def room(self) -> int:
        return (self.available or 0) + self.held

    def margin(self, needs: HostNeeds) -> int:
        """Left to everything else: as much again of what is small, so that a toy runs on a machine that is full."""
        return min(MARGIN_BYTES, max(0, needs.total - self.held))

    def has_room_for(self, needs: HostNeeds) -> bool:
        return self.available is None or needs.total + self.margin(needs) <= self.room

    def list_fitting(self, *, has_disk: bool, num_machines: int | None) -> Iterator[str]:
        """Yield settings with which it would fit, and what is needed then."""
        on_disk = replace(self.needs, states=0)
        choices = []
        if self.needs.states and not has_disk:
            choices.append((_DISK, on_disk))
            choices += [(setting, replace(self.needs, states=states)) for setting, states in _list_forms(self.needs)]
        if self.needs.can_be_narrow:
            choices.append((_NARROW, _halve(self.needs)))
            if self.needs.states and not has_disk:
                choices.append((f"{_DISK} and {_NARROW}", _halve(on_disk)))
        for setting, needs in choices:
            if self.has_room_for(needs):
                yield f"{setting} ({format_bytes(needs.total)})"
        room = (self.available or 0) - MARGIN_BYTES
        if num_machines is not None and room > 0:
            yield f"{math.ceil(self.needs.total * num_machines / room)} such machines, each with as many ranks"


def _iterate_states(
    optimizer: Optimizer, shards: Mapping[nn.Parameter, nn.Parameter], form: StateForm | None
) -> Iterator[int]:
    if why_not_steppable(optimizer) is not None or not is_elementwise(type(optimizer)):
        return
    for group in optimizer.param_groups:
        parameters = [shards.get(parameter, parameter) for parameter in group["params"]]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for dtype in {parameter.dtype for parameter in trained}:
            layout = replace(find_layout(optimizer, group, dtype), form=form)
            sizes = (local_part(parameter).numel() for parameter in trained if parameter.dtype == dtype)
            yield sum(sum(layout.kept_bytes(size)) for size in sizes)


def _list_forms(needs: HostNeeds) -> Iterator[tuple[str, int]]:
    """Yield settings in which states take less, and how much."""
    for name, states in zip(FORMS, needs.narrow_states, strict=True):
        if 0 < states < needs.states:
            yield f"host_state={name!r}", states


def _halve(needs: HostNeeds) -> HostNeeds:
    return HostNeeds(needs.weights // 2, 0, needs.gradients // 2, needs.states // 2)


def _list_kinds(needs: HostNeeds) -> str:
    kinds = {
        "weights": needs.weights,
        "16-bit copies": needs.narrow_copies,
        "gradients": needs.gradients,
        "states of optimizers": needs.states,
    }
    return ", ".join(f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in kinds.items() if num_bytes)


def _advise(fitting: Iterable[str]) -> str:
    listed = list(fitting)
    if not listed:
        return "No setting would make it fit: use a machine with more memory, or a smaller model."
    return f"It would fit with {', or with '.join(listed)}."
