"""Check that a host has the memory that a run needs, before it is allocated: the kernel kills processes otherwise."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.host.arena import MARGIN_BYTES, OffloadError
from lightning_vram.core.processes.rank_errors import gather_objects
from lightning_vram.memory.host.available import available_host_bytes, free_swap_bytes
from lightning_vram.memory.host.machine import machine_name
from lightning_vram.memory.units import format_bytes
from lightning_vram.optimizers.on_host.host_needs import HostNeeds
from lightning_vram.optimizers.stepping.state_forms import FORMS
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part

_DISK, _NARROW = "nvme_path='/a/fast/disk'", "precision='bf16-true'"


def margin_bytes(taken_bytes: int) -> int:
    """Return what must stay free: as much again for small models, so that a toy runs on a full machine."""
    return min(MARGIN_BYTES, max(0, taken_bytes))


class HostRoom:
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
        of_states = (local_part(value) for state in states for value in state.values())
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
            if not machine.has_room_for(needed := machine.needs):
                fitting = machine.list_fitting(has_disk=has_disk, num_machines=len(machines) if is_spread else None)
                raise OffloadError(
                    f"{name} needs {format_bytes(needed.total)} of host memory on {host}{machine.ranks}: "
                    f"{_list_kinds(needed)}. Available are {format_bytes(machine.room)}, including the memory of the "
                    "module, of "
                    f"which {format_bytes(machine.margin(needed))} must stay free. {_advise(fitting)}"
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
    def ranks(self) -> str:
        return f" for its {self.num_ranks} ranks" if self.num_ranks > 1 else ""

    @property
    def room(self) -> int:
        return (self.available or 0) + self.held

    def margin(self, needs: HostNeeds) -> int:
        return margin_bytes(needs.total - self.held)

    def has_room_for(self, needs: HostNeeds) -> bool:
        return self.available is None or needs.total + self.margin(needs) <= self.room

    def list_fitting(self, *, has_disk: bool, num_machines: int | None) -> Iterator[str]:
        """Yield settings that would fit, with their needs."""
        on_disk = replace(self.needs, states=0)
        choices = []
        if self.needs.states and not has_disk:
            choices.append((_DISK, on_disk))
        choices += _list_leaner(self.needs, has_disk=has_disk)
        if self.needs.can_be_16_bit:
            choices.append((_NARROW, _halve(self.needs)))
            if self.needs.states and not has_disk:
                choices.append((f"{_DISK} and {_NARROW}", _halve(on_disk)))
        for setting, needs in choices:
            if self.has_room_for(needs):
                yield f"{setting} ({format_bytes(needs.total)})"
        room = (self.available or 0) - MARGIN_BYTES
        if num_machines is not None and room > 0:
            yield f"{math.ceil(self.needs.total * num_machines / room)} such machines, each with as many ranks"


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


def _list_kinds(needs: HostNeeds) -> str:
    kinds = {
        "weights": needs.weights,
        "16-bit copies": needs.low_precision_copies,
        "gradients": needs.gradients,
        "optimizer state": needs.states,
        "averages of weights": needs.averages,
    }
    return ", ".join(f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in kinds.items() if num_bytes)


def _advise(fitting: Iterable[str]) -> str:
    listed = list(fitting)
    if not listed:
        return "No setting would make it fit: use a machine with more memory, or a smaller model."
    return f"It would fit with {', or with '.join(listed)}."
