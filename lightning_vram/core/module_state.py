"""The state of a module, to restore: its attributes, and its buffers."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_vram.core.random_state import own_sources
from lightning_vram.core.tensors.properties import REAL_TYPES, is_shard, is_strided
from lightning_vram.memory.device.accelerators import has_streams
from lightning_vram.memory.storages import NO_VERSION, storage_address, version_of
from lightning_vram.memory.units import MIB
from lightning_vram.private_names.dispatcher import copy_each
from lightning_vram.private_names.torch import CHILDREN, PARAMETERS

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
        registered = self._attributes[PARAMETERS]
        self._parameters = registered.copy() if type(registered) in _DICTS else None  # not of a scripted module
        self._empty: list[Any] = []  # containers
        self._undos: list[Undo] = []  # of containers that are not empty, and of generators
        for name, value in self._attributes.items():
            kind = type(value)
            if kind in _CONTAINERS:
                if not value:
                    self._empty.append(value)
                elif name in _REGISTRIES and name != PARAMETERS:
                    self._undos.append(partial(_refill, value, value.copy()))
                elif name != PARAMETERS:
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
        registered, parameters = now[PARAMETERS], self._parameters
        if parameters is None or not (parameters or registered) or _has(registered, parameters):
            return
        if not any(map(is_shard, (*registered.values(), *parameters.values()))):  # FSDP2 moves its own in and out
            _refill(registered, parameters)

    def _note_generator(self, value: Any) -> None:
        source = own_sources().get(type(value))
        if source is not None:
            read, write = source(value)
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
        children = vars(member)[CHILDREN]
        if children:
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    waiting.append(child)
    return members


ALWAYS_COPIED_BYTES = MIB
_PLAIN_KINDS = (Tensor, nn.Parameter, nn.Buffer)


def differs(tensor: Tensor, start: Tensor | None) -> bool:
    """Whether a tensor was written past its version counter: through ``.data``, or by a kernel."""
    is_plain = (type(tensor) is nn.Buffer or type(tensor) in REAL_TYPES) and tensor.layout is torch.strided
    if type(start) is not Tensor or not is_plain or tensor.is_meta or tensor.is_nested:
        return False
    if tensor.shape != start.shape or torch.equal(tensor, start):
        return tensor.shape != start.shape
    return not bool(((tensor == start) | ((tensor != tensor) & (start != start))).all())  # NaN is not a change


class BufferCopy:
    """One tensor, and its value at one time."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_plain = type(tensor) in _PLAIN_KINDS and is_strided(tensor)
        self.is_small = self.is_plain and tensor.nbytes <= ALWAYS_COPIED_BYTES
        self._is_counted: bool | None = None if self.is_plain else False  # whether the version tells of all writes
        self.value = tensor.detach().clone() if self.is_small or not self.is_plain else tensor.detach().cpu().clone()
        self._mark()

    def is_replaced(self) -> bool:
        """Whether the tensor has another shape, type or device than the copy was made for."""
        tensor, (shape, dtype, device, _) = self.tensor, self._place
        return tensor.dtype is not dtype or tensor.shape != shape or tensor.device != device

    def is_changed(self) -> bool:
        """Whether the tensor may have been written since the copy was made."""
        return not self._is_counted or self._has_changed_visibly()

    def refresh(self) -> None:
        """Copy a tensor that is not small again, if it may have been written."""
        if self._is_counted is None and not self._has_changed_visibly():
            self._is_counted = not differs(self.tensor.detach().to(self.value.device), self.value)
        if self.is_changed():
            if self.is_plain and has_streams(self.tensor.device.type) and not self.value.is_pinned():
                self.value = torch.empty_like(self.value, pin_memory=True)
            self.value.copy_(self.tensor.detach(), non_blocking=self.value.is_pinned())
            self._mark()

    def restore(self) -> None:
        """Write the value back, in place."""
        if not self.is_changed():
            return
        is_inference = self.tensor.is_inference()
        with torch.inference_mode(mode=is_inference), torch.no_grad():
            if self.is_replaced():
                self.tensor.data = self.value.to(self._place[2], copy=True)
            else:
                # The copy back is ordered before the next refresh: both run on the current stream.
                self.tensor.copy_(self.value, non_blocking=self.value.is_pinned())
        self._mark()

    def _has_changed_visibly(self) -> bool:
        return version_of(self.tensor) != self._version or _place(self.tensor) != self._place

    def _mark(self) -> None:
        self._version = version_of(self.tensor)
        self._place = _place(self.tensor)
        if self._version == NO_VERSION:
            self._is_counted = False


class BufferCopies:
    """Copies of a model's tensors, held over many steps.

    Autograd counts writes, so large constants (masks, rotary tables) are copied once. Up to 1 MiB is copied in every
    step: kernels such as those of batch normalization write uncounted. A large tensor that is written uncounted is
    found in the second step, and copied in every step from then on. Copies of large tensors are on the host, pinned.
    """

    def __init__(self) -> None:
        self._copies: dict[int, BufferCopy] = {}
        self._small: list[BufferCopy] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    def take(self, tensors: Iterable[Tensor]) -> list[BufferCopy]:
        """Return up-to-date copies of tensors with memory, good until the next call; drop those of others."""
        before, self._copies = self._copies, {}
        small: list[BufferCopy] = []
        with torch.inference_mode(mode=False), torch.no_grad():  # a copy made for an evaluation serves training as well
            for place, tensor in {id(tensor): tensor for tensor in tensors}.items():
                copy = before.get(place)
                if copy is None or copy.is_replaced():
                    if tensor.is_meta or is_lazy(tensor):
                        continue
                    copy = BufferCopy(tensor)
                elif copy.is_small:
                    small.append(copy)
                else:
                    copy.refresh()
                self._copies[place] = copy
            if small != self._small:
                self._small, self._groups = small, _group(small)
            for values, originals in self._groups:
                copy_each(values, originals)
        return list(self._copies.values())


def _group(copies: list[BufferCopy]) -> list[tuple[list[Tensor], list[Tensor]]]:
    groups: dict[tuple[torch.dtype, torch.device], list[BufferCopy]] = defaultdict(list)
    for copy in copies:
        groups[copy.tensor.dtype, copy.tensor.device].append(copy)
    return [([copy.value for copy in group], [copy.tensor for copy in group]) for group in groups.values()]


def _place(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, tuple[int, int]]:
    offset = int(tensor.storage_offset()) if is_strided(tensor) else 0
    return tensor.shape, tensor.dtype, tensor.device, (storage_address(tensor), offset)
