"""Let a forward run twice and count once: the second run starts where the first did, and leaves nothing behind.

Recomputation runs a forward again, and whatever the forward writes would be written twice: BatchNorm moves its running
statistics two times per step (pytorch#96136), spectral norm iterates from another start and computes another weight,
a list of auxiliary losses grows. Besides, the second run may be stopped early, as soon as it has made what the
backward needs, so what a forward sets and resets (``eval()`` and ``train()``, a weight) may stay set.

Here the modules are put back into the state from before the first run, on copies, and get their own state back
afterwards: attributes, lists, dicts and the like in them (up to a thousand items), hooks, buffers, generators, and
which parameters stand where and need gradients. What cannot be seen: objects of other kinds that change inside, and
parameters that the forward itself overwrites. One thread at a time: a second one would see the state of the first.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import itemgetter, methodcaller
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.rollback.attribute_state import AttributeLayout, AttributeState
from lightning_vram.core.rollback.buffer_copies import ALWAYS_COPIED_BYTES, differs
from lightning_vram.core.rollback.module_roster import iterate_members
from lightning_vram.core.rollback.statistics_reads import StatisticsReads
from lightning_vram.core.tensors.shards import is_shard
from lightning_vram.core.tensors.versions import version_of
from lightning_vram.private_names.torch.compiled import OptimizedModule
from lightning_vram.private_names.torch.modules import BUFFERS, PARAMETERS, NormBase, own_buffers, own_parameters
from lightning_vram.private_names.torch.tensors import is_view, storage_identity

_read_values = methodcaller("values")


@dataclass
class WrittenBuffers:
    """What was learned about a layer in its first run: which buffers it writes.

    Args:
        names: Places of written buffers, by number of the module and name; ``None`` before the first run.
        has_read_statistics: Whether it reads the running statistics of its norms.
        layouts: Of the modules in it. They hold no values.
    """

    names: set[tuple[int, str]] | None = None
    has_read_statistics: bool = False
    layouts: list[AttributeLayout] = field(default_factory=list)


@dataclass
class _Buffer:
    owner: nn.Module
    tensor: Tensor
    version: int
    start: Tensor | None  # its value before the forward, if it is kept


class ModuleSnapshot:
    """The state of modules before a forward; as a context manager, the time in which it runs again.

    Args:
        modules: Modules whose forward runs, with their children.
        written: What is known about their buffers; filled in after the first run.
    """

    def __init__(self, modules: Sequence[nn.Module], written: WrittenBuffers) -> None:
        self._modules = modules
        self._written = written
        self._members: list[nn.Module] = []
        for member in iterate_members(*modules):
            if not isinstance(member, OptimizedModule):  # a mere shell
                self._members.append(member)
        # What a forward adds to a large container is taken away when the second run is over, not before it.
        self._states = self._take(shortens=False)
        self._requires_grad: list[list[bool]] = []
        for registered in self._own(PARAMETERS):
            self._requires_grad.append(
                [p is not None and p.requires_grad for p in registered.values()] if registered else []
            )
        # In the first run all buffers are copied: whether it reads its statistics is not known yet.
        counts_statistics = written.names is None or written.has_read_statistics
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        for number, (member, buffers) in enumerate(zip(self._members, self._own(BUFFERS), strict=True)):
            for name, buffer in buffers.items():
                if buffer is not None and (counts_statistics or not _is_statistic(member, name)):
                    start = _copy(buffer) if self._may_be_written(number, name, buffer) else None
                    self._buffers[number, name] = _Buffer(member, buffer, version_of(buffer), start)
        self._entered: list[tuple[list[AttributeState], list[tuple[Tensor, Tensor, bool]]]] = []

    def devices(self) -> set[torch.device]:
        """Return the device of the first parameter: a layer may get its tensors inside an object of the user's."""
        parameters = chain.from_iterable(map(_read_values, self._own(PARAMETERS)))
        first = next((parameter for parameter in parameters if parameter is not None), None)
        return {first.device} if first is not None else set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run the forward inside: in the first run it is watched."""
        reads = StatisticsReads(self._modules) if self._written.names is None else None
        if reads is None or not reads.is_needed:
            yield
            return
        with reads:
            yield
        self._written.has_read_statistics = reads.has_read

    def settle(self) -> None:
        """Call after the forward: keep the starts of the buffers it wrote, forget the others.

        Raises:
            RuntimeError: If it wrote a large buffer that it had not written in its first run.
        """
        is_first = self._written.names is None
        known = self._written.names = self._written.names or set()
        for place, buffer in self._buffers.items():
            name = place[1]
            is_written = (
                place in known
                or own_buffers(buffer.owner).get(name) is not buffer.tensor
                or version_of(buffer.tensor) != buffer.version
                or (is_first and differs(buffer.tensor, buffer.start))
            )
            if not is_written:
                buffer.start = None
            elif buffer.start is None:
                raise RuntimeError(
                    f"layer {type(self._modules[0]).__name__} writes its buffer {name!r} in some forwards "
                    "and not in others, and cannot be recomputed. Choose other layers to checkpoint."
                )
            else:
                known.add(place)

    def __enter__(self) -> None:
        now = self._take(shortens=True)
        self._entered.append((now, self._take_parameters()))
        stand_ins: dict[int, Tensor] = {}
        for number, (state, present) in enumerate(zip(self._states, now, strict=True)):
            state.put_back()
            if present.layout.tensors:  # views of other tensors stay as they are: FSDP1 sets parameters that way
                vars(state.module).update({name: t for name, t in present.tensors().items() if is_view(t)})
            if self._requires_grad[number]:
                registered = own_parameters(state.module).values()
                for parameter, requires_grad in zip(registered, self._requires_grad[number], strict=False):
                    if parameter is not None and parameter.requires_grad != requires_grad:
                        parameter.requires_grad_(requires_grad)
            buffers = vars(state.module)[BUFFERS]
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = self._stand_in(number, name, buffer, stand_ins)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now, parameters = self._entered.pop()
        for state in now:
            state.put_back()
        for parameter, data, requires_grad in parameters:
            if _is_moved(parameter, data):
                parameter.data = data
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)

    def _own(self, registry: str) -> Iterator[dict[str, Any]]:
        """Return the very dictionaries of all members: this and what follows calls no function of Python for each."""
        return map(itemgetter(registry), map(vars, self._members))

    def _take_parameters(self) -> list[tuple[Tensor, Tensor, bool]]:
        parameters: list[tuple[Tensor, Tensor, bool]] = []
        for parameter in chain.from_iterable(map(_read_values, self._own(PARAMETERS))):
            if type(parameter) is nn.Parameter or (parameter is not None and not is_shard(parameter)):
                parameters.append((parameter, parameter.data, parameter.requires_grad))
        return parameters

    def _take(self, *, shortens: bool) -> list[AttributeState]:
        layouts = chain(self._written.layouts, repeat(None))
        states = [
            AttributeState(member, layout=layout, shortens=shortens)
            for member, layout in zip(self._members, layouts, strict=False)
        ]
        self._written.layouts = [state.layout for state in states]
        return states

    def _stand_in(self, number: int, name: str, buffer: Tensor, stand_ins: dict[int, Tensor]) -> Tensor:
        kept = self._buffers.get((number, name))
        start = kept.start if kept is not None else buffer  # no account is kept of statistics
        if start is None:
            return buffer
        if id(buffer) not in stand_ins:  # one tensor under two names stays one
            stand_ins[id(buffer)] = _copy(start)  # a copy of the copy: a retained graph may be recomputed again
        return stand_ins[id(buffer)]

    def _may_be_written(self, number: int, name: str, buffer: Tensor) -> bool:
        names = self._written.names
        return names is None or (number, name) in names or buffer.nbytes <= ALWAYS_COPIED_BYTES


def _is_statistic(module: nn.Module, name: str) -> bool:
    """Running statistics of torch's own norms: written while training, without a trace in the version, but not read."""
    return isinstance(module, NormBase) and type(module).forward.__module__.startswith("torch.nn.modules.")


def _is_moved(parameter: Tensor, data: Tensor) -> bool:
    """Whether a parameter lies elsewhere than ``data``, which was its own; fake tensors have no ``data_ptr()``."""
    if parameter.storage_offset() != data.storage_offset():
        return True
    try:
        return storage_identity(parameter) != storage_identity(data)
    except (NotImplementedError, RuntimeError):  # not one piece of memory
        return False


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def iterate_floating_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of ``module`` that are neither masks nor statistics of torch's own norms."""
    for member in module.modules():
        for name, buffer in own_buffers(member).items():
            if buffer is not None and buffer.dtype not in (torch.bool, torch.uint8) and not _is_statistic(member, name):
                yield buffer
