"""The state of a module, to restore: its attributes, and what a forward found. May import: core below it."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_, itemgetter, methodcaller
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_vram.core.random_state import AmbientState, source_of
from lightning_vram.core.tensors.properties import REAL_TYPES, is_shard, num_bytes_of
from lightning_vram.memory.storages import version_of
from lightning_vram.memory.units import MIB
from lightning_vram.private_names import torch as private
from lightning_vram.private_names.ddp import is_part_of_flat_parameter
from lightning_vram.private_names.dispatcher import OptimizedModule

ALWAYS_COPIED_BYTES = MIB
SAVED_COPY_BYTES = 64 * 1024  # copies up to this size are saved whether the tensor is written or not

_MAX_ITEMS = 1000  # of a container that is looked into
_MAX_COPIED_ITEMS = 100_000
_MAX_DEPTH = 4

_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_CONTAINERS = _DICTS | {list, set, deque}
_CONSTANTS = frozenset((bool, int, float, str, tuple, type(None), torch.dtype, torch.device))

_REGISTRIES = frozenset(vars(nn.Module()))  # nothing in these dicts needs a look inside

Undo = Callable[[], object]


class AttributeState:
    """All attributes of one module, without its children: modes, hooks, registries and its own.

    They are restored in the very objects that held them, since other code (a hook's handle, a logger) refers to these.
    Lists, dicts and the like get their former content back, up to 100,000 items, and those in them, up to 1000 items;
    generators get their positions back. Not detected: objects of other kinds that change inside.
    """

    __slots__ = ("_attributes", "_empty", "_kind", "_parameters", "_undos", "module", "tensors")

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors: dict[str, Tensor] = {}  # the attributes that are
        self._kind = type(module)
        self._attributes = vars(module).copy()
        registered = self._attributes[private.PARAMETERS]
        self._parameters = registered.copy() if type(registered) in _DICTS else None  # not of a scripted module
        self._empty: list[Any] = []  # containers
        self._undos: list[Undo] = []  # of containers that are not empty, and of generators
        for name, value in self._attributes.items():
            kind = type(value)
            if kind in _CONTAINERS:
                if not value:
                    self._empty.append(value)
                elif name in _REGISTRIES and name != private.PARAMETERS:
                    self._undos.append(partial(_refill, value, value.copy()))
                elif name != private.PARAMETERS:
                    self._note(value, depth=0)
            elif isinstance(value, Tensor):
                self.tensors[name] = value
            elif kind not in _CONSTANTS:
                self._note_generator(value)

    def restore(self) -> None:
        """Put everything back. May be called again."""
        if type(self.module) is not self._kind:  # a lazy layer that got its weights became another
            return
        now, before = vars(self.module), self._attributes
        if not _has(now, before):
            now.update(before)
            for name in [name for name in now if name not in before]:
                del now[name]
        for container in filter(None, self._empty):
            container.clear()
        for undo in self._undos:
            undo()
        registered, parameters = now[private.PARAMETERS], self._parameters
        if parameters is None or not (parameters or registered) or _has(registered, parameters):
            return
        if not any(map(is_shard, (*registered.values(), *parameters.values()))):  # FSDP2 moves its own in and out
            _refill(registered, parameters)

    def _note_generator(self, value: Any) -> None:
        source = source_of(value)
        if source is not None:
            read, write = source
            self._undos.append(partial(write, read()))

    def _note(self, container: Any, depth: int) -> None:
        kind, length = type(container), len(container)
        if length <= _MAX_COPIED_ITEMS:
            self._undos.append(partial(_refill, container, container.copy()))
        if kind is set or depth == _MAX_DEPTH or length > _MAX_ITEMS:
            return
        for item in container.values() if kind in _DICTS else container:
            if type(item) in _CONTAINERS:
                self._note(item, depth + 1)
            else:
                self._note_generator(item)


def _refill(container: Any, content: Any) -> None:
    if type(container) in _DICTS:
        if not _has(container, content):
            container.clear()
            container.update(content)
    else:
        container.clear()
        (container.update if type(container) is set else container.extend)(content)


def _has(container: dict[Any, Any], content: dict[Any, Any]) -> bool:
    """Whether it holds these very objects: then nothing is written, since other code may be in a loop over it."""
    return all(map(is_, container.values(), content.values())) and [*container] == [*content]


def iterate_members(*modules: nn.Module) -> list[nn.Module]:
    """Return ``modules`` and all modules in them, each once; quicker than ``modules()``, which hashes by state."""
    waiting = list({id(module): module for module in modules}.values())
    seen = set(map(id, waiting))
    members: list[nn.Module] = []
    while waiting:
        member = waiting.pop()
        members.append(member)
        children = vars(member)[private.CHILDREN]
        if children:
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    waiting.append(child)
    return members


def differs(tensor: Tensor, start: Tensor | None) -> bool:
    """Whether a tensor was written past its version counter: through ``.data``, or by a kernel."""
    is_plain = (type(tensor) is nn.Buffer or type(tensor) in REAL_TYPES) and tensor.layout is torch.strided
    if type(start) is not Tensor or not is_plain or tensor.is_meta or tensor.is_nested:
        return False
    if tensor.shape != start.shape or torch.equal(tensor, start):
        return tensor.shape != start.shape
    return not bool(((tensor == start) | ((tensor != tensor) & (start != start))).all())  # NaN is not a change


_T = TypeVar("_T")
_read_values = methodcaller("values")


@dataclass
class ForwardFacts:
    """What the forwards of a module have shown so far; ``None`` before the first."""

    written: set[tuple[int, str]] | None = None  # buffers and tensor attributes: number of the submodule, and name
    draws_from_numpy: bool | None = None  # one that does so in later forwards only is not noticed
    reads_statistics: bool | None = None  # whether its code names the running statistics of its norms


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
        self._statistics: list[tuple[dict[str, Any], str]] = []  # that move on, and that nobody reads
        self._watched: list[tuple[str, Tensor, int]] = []  # with its version
        for number, (buffers, state) in enumerate(zip(self._own(private.BUFFERS), self._states, strict=True)):
            if buffers:
                self._take_buffers(number, buffers)
            for name, tensor in state.tensors.items():
                if type(tensor) is Tensor and not is_part_of_flat_parameter(tensor):
                    self._hold(number, name, vars(state.module), tensor)
        # Those of the parameters, too: a layer may get its tensors inside an object of the user's.
        parameters = chain.from_iterable(map(_read_values, self._own(private.PARAMETERS)))
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
                    self._watched.append((place[1], held.tensor, private.num_writes(held.tensor)))
        drawn = self._ambient.settle()
        if self._learned.draws_from_numpy is None:
            self._learned.draws_from_numpy = "numpy" in drawn
        return drawn

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work`` in the state before the forward. May be called again."""
        for name, one, version in self._watched:
            if private.num_writes(one) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name} of shape {list(one.shape)} in {self._name}, a layer that is recomputed. Assign a new one."
                )
        return self._ambient.run(lambda: self._run(work))

    def _run(self, work: Callable[[], _T]) -> _T:
        now = [AttributeState(member) for member in self._members]
        with private.without_torch_function():  # who observes a weight hears only of what the layer does with it
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
                views = {name: t for name, t in present.tensors.items() if is_part_of_flat_parameter(t)}
                vars(state.module).update(views)
        for parameter, requires_grad in self._parameters:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        copies: dict[int, Tensor] = {}  # one tensor under two names stays one
        for (_, name), held in self._held.items():
            if held.start is not None:  # copied once more: a retained graph may be recomputed again
                held.registry[name] = copies.setdefault(id(held.tensor), writable_copy(held.start))
        for registry, name in self._statistics:
            registry[name] = writable_copy(registry[name])

    def _take_buffers(self, number: int, buffers: dict[str, Any]) -> None:
        member = self._members[number]
        are_statistics = member.training and _has_statistics(member) and not self._reads_statistics()
        are_statistics &= not isinstance(member, private.InstanceNormBase)  # saves copies of them
        for name, buffer in buffers.items():
            if buffer is not None and are_statistics:
                self._statistics.append((buffers, name))
            elif buffer is not None:
                self._hold(number, name, buffers, buffer)

    def _hold(self, number: int, name: str, registry: dict[str, Any], tensor: Tensor) -> None:
        written, place = self._learned.written, (number, name)
        if tensor.requires_grad:  # a weight that was computed, or a condition: not written as a rule
            is_copied = num_bytes_of(tensor) <= SAVED_COPY_BYTES or place in (written or ())
        else:
            is_copied = written is None or place in written or num_bytes_of(tensor) <= ALWAYS_COPIED_BYTES
        self._held[place] = _Held(registry, tensor, writable_copy(tensor) if is_copied else None, version_of(tensor))

    def _reads_statistics(self) -> bool:
        if self._learned.reads_statistics is None:
            classes = {kind for member in self._members for kind in type(member).__mro__}
            own = [kind for kind in classes if not kind.__module__.startswith("torch.nn.modules.")]
            self._learned.reads_statistics = any(_names_statistics(one) for kind in own for one in vars(kind).values())
        return self._learned.reads_statistics

    def _own(self, registry: str) -> Iterator[dict[str, Any]]:
        """Yield the registries of all members: this and its callers call no Python function for each."""
        return map(itemgetter(registry), map(vars, self._members))

    def _iterate_parameters(self) -> Iterator[Tensor]:
        for parameter in chain.from_iterable(map(_read_values, self._own(private.PARAMETERS))):
            if type(parameter) is nn.Parameter or (parameter is not None and not is_shard(parameter)):
                yield parameter


def _has_statistics(module: nn.Module) -> bool:
    """Whether buffers are statistics of torch's own norms: written in training, past their version, and not read."""
    return isinstance(module, private.NormBase) and type(module).forward.__module__.startswith("torch.nn.modules.")


def _names_statistics(value: Any) -> bool:
    """Whether a function or property, or code inside of it, names running statistics."""
    value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
    code = getattr(getattr(value, "__wrapped__", value), "__code__", value)
    if not isinstance(code, CodeType):
        return False
    return not {"running_mean", "running_var"}.isdisjoint(code.co_names) or any(map(_names_statistics, code.co_consts))


def _is_moved(parameter: Tensor, data: Tensor) -> bool:
    """Whether a parameter is elsewhere than ``data``, which was its own; fake tensors have no ``data_ptr()``."""
    if parameter.storage_offset() != data.storage_offset():
        return True
    try:
        return private.storage_identity(parameter) != private.storage_identity(data)
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
        if not _has_statistics(member):
            buffers = (buffer for buffer in private.own_buffers(member).values() if buffer is not None)
            yield from (buffer for buffer in buffers if buffer.dtype not in (torch.bool, torch.uint8))
