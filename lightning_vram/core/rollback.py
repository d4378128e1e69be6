"""Restore a module as it was before a forward, to recompute it. May import: core below it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_vram.core.module_state import (
    ALWAYS_COPIED_BYTES,
    AttributeState,
    differs,
    iterate_members,
)
from lightning_vram.core.random_state import AmbientState
from lightning_vram.core.tensors.properties import is_shard, num_bytes_of
from lightning_vram.memory.storages import version_of
from lightning_vram.private_names.ddp import is_part_of_flat_parameter
from lightning_vram.private_names.dispatcher import OptimizedModule
from lightning_vram.private_names.torch import (
    BUFFERS,
    PARAMETERS,
    NormBase,
    num_writes,
    own_buffers,
    storage_identity,
    without_torch_function,
)

_T = TypeVar("_T")
SAVED_COPY_BYTES = 64 * 1024  # copies up to this size are saved whether the tensor is written or not
_read_values = methodcaller("values")


@dataclass
class ForwardFacts:
    """What the forwards of a module have shown so far; ``None`` before the first."""

    written: set[tuple[int, str]] | None = None  # buffers and tensor attributes: number of the submodule, and name
    draws_from_numpy: bool | None = None  # one that does so in later forwards only is not noticed


@dataclass(slots=True)
class _Held:
    """A buffer or tensor attribute. ``start`` is its value before the forward, if that is saved."""

    registry: dict[str, Any]
    tensor: Tensor
    start: Tensor | None
    version: int


class ForwardState:
    """The start of a forward of ``modules``: call :meth:`settle` right after it, and :meth:`run` to repeat it.

    Until recomputation in the backward the module or its ambient state may change (an adapter is switched, ``eval()``),
    and a second run would write twice: BatchNorm would move its statistics two times per step (pytorch#96136). So these
    are restored for the recomputation, and put back afterwards: :class:`AttributeState`, which parameters are where,
    buffers and tensor attributes by value, and the :class:`AmbientState`. A tensor that is not copied and was
    overwritten meanwhile is an error, as in autograd. Not detected: other objects that change inside, globals, and
    parameters that the forward itself overwrites. One thread at a time.

    ``devices`` are those on which the modules may compute in addition to those of their parameters.
    """

    def __init__(
        self, modules: Sequence[nn.Module], learned: ForwardFacts, devices: Iterable[torch.device] = ()
    ) -> None:
        self._name = type(modules[0]).__name__
        self._learned = learned
        self._members = [member for member in iterate_members(*modules) if not isinstance(member, OptimizedModule)]
        self._states = [AttributeState(member) for member in self._members]
        self._parameters = [(one, one.requires_grad) for one in self._iterate_parameters()]
        self._held: dict[tuple[int, str], _Held] = {}
        self._watched: list[tuple[str, Tensor, int]] = []  # with its version
        for number, (buffers, state) in enumerate(zip(self._own(BUFFERS), self._states, strict=True)):
            for name, tensor in buffers.items():
                if tensor is not None:
                    self._hold(number, name, buffers, tensor)
            for name, tensor in state.tensors.items():
                if type(tensor) is Tensor and not is_part_of_flat_parameter(tensor):
                    self._hold(number, name, vars(state.module), tensor)
        # Those of the parameters, too: a layer may get its tensors inside an object of the user's.
        parameters = chain.from_iterable(map(_read_values, self._own(PARAMETERS)))
        devices = {*devices, *(parameter.device for parameter in parameters if parameter is not None)}
        self._ambient = AmbientState(devices, has_numpy=learned.draws_from_numpy is not False)

    def settle(self) -> set[str]:
        """Save the starts of written tensors after the forward; returns its generators: ``"python"``, ``"numpy"``."""
        is_first = self._learned.written is None
        known = self._learned.written = self._learned.written or set()
        for place, held in self._held.items():
            is_written = version_of(held.tensor) != held.version or (is_first and differs(held.tensor, held.start))
            if is_written or place in known:
                known.add(place)
                if held.start is None:
                    raise RuntimeError(
                        f"layer {self._name} overwrites {place[1]!r} in place in this forward. It is too large to be "
                        "copied in every forward, so the layer cannot be recomputed: leave it out (layers=)."
                    )
            elif num_bytes_of(held.tensor) > SAVED_COPY_BYTES:
                held.start = None
                if not held.tensor.is_inference():
                    self._watched.append((place[1], held.tensor, num_writes(held.tensor)))
        drawn = self._ambient.settle()
        if self._learned.draws_from_numpy is None:
            self._learned.draws_from_numpy = "numpy" in drawn
        return drawn

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work`` in the state before the forward. May be called again."""
        for name, one, version in self._watched:
            if num_writes(one) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name} of shape {list(one.shape)} in {self._name}, a layer that is recomputed. Write it after "
                    "the backward, or assign a new tensor."
                )
        return self._ambient.run(lambda: self._run(work))

    def _run(self, work: Callable[[], _T]) -> _T:
        now = [AttributeState(member) for member in self._members]
        with without_torch_function():  # who observes a weight hears only of what the layer does with it
            parameters = [(one, one.data, one.requires_grad) for one in self._iterate_parameters()]
        try:
            self._put_back(now)
            return work()
        finally:
            for state in now:
                state.restore()
            for parameter, data, requires_grad in parameters:
                if _is_moved(parameter, data):
                    parameter.data = data
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)

    def _put_back(self, now: list[AttributeState]) -> None:
        for state, present in zip(self._states, now, strict=True):
            state.restore()
            if present.tensors:  # FSDP1 sets parameters as views of its flat one, anew for the backward
                vars(state.module).update(
                    {name: t for name, t in present.tensors.items() if is_part_of_flat_parameter(t)}
                )
        for parameter, requires_grad in self._parameters:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        copies: dict[int, Tensor] = {}  # one tensor under two names stays one
        for (_, name), held in self._held.items():
            if held.start is not None:  # copied once more: a retained graph may be recomputed again
                held.registry[name] = copies.setdefault(id(held.tensor), writable_copy(held.start))

    def _hold(self, number: int, name: str, registry: dict[str, Any], tensor: Tensor) -> None:
        written, place = self._learned.written, (number, name)
        if tensor.requires_grad:  # a weight that was computed, or a condition: not written as a rule
            is_copied = num_bytes_of(tensor) <= SAVED_COPY_BYTES or place in (written or ())
        else:
            is_copied = written is None or place in written or num_bytes_of(tensor) <= ALWAYS_COPIED_BYTES
        self._held[place] = _Held(registry, tensor, writable_copy(tensor) if is_copied else None, version_of(tensor))

    def _own(self, registry: str) -> Iterator[dict[str, Any]]:
        """Yield the registries of all members: this and its callers call no Python function for each."""
        return map(itemgetter(registry), map(vars, self._members))

    def _iterate_parameters(self) -> Iterator[Tensor]:
        for parameter in chain.from_iterable(map(_read_values, self._own(PARAMETERS))):
            if type(parameter) is nn.Parameter or (parameter is not None and not is_shard(parameter)):
                yield parameter


def _is_moved(parameter: Tensor, data: Tensor) -> bool:
    """Whether a parameter is elsewhere than ``data``, which was its own; fake tensors have no ``data_ptr()``."""
    if parameter.storage_offset() != data.storage_offset():
        return True
    try:
        return storage_identity(parameter) != storage_identity(data)
    except (NotImplementedError, RuntimeError):  # not one piece of memory
        return False


def writable_copy(tensor: Tensor) -> Tensor:
    """Return a copy that needs a gradient if ``tensor`` does, and can be written in place if it can."""
    with torch.no_grad():
        twin = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.enable_grad():
        return twin if tensor.is_leaf else twin.clone()


def iterate_floating_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of ``module`` that are neither masks nor statistics of torch's own norms."""
    for member in module.modules():
        # torch's own norms write their statistics in training, and do not read them
        if not (isinstance(member, NormBase) and type(member).forward.__module__.startswith("torch.nn.modules.")):
            buffers = (buffer for buffer in own_buffers(member).values() if buffer is not None)
            yield from (buffer for buffer in buffers if buffer.dtype not in (torch.bool, torch.uint8))
