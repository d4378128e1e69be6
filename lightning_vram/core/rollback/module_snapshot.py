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

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.rollback.statistics_reads import StatisticsReads
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES
from lightning_vram.core.tensors.shards import is_shard
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.memory.units import MIB
from lightning_vram.private_names.torch.compiled import OptimizedModule
from lightning_vram.private_names.torch.modules import (
    BUFFERS,
    FORWARD_HOOKS,
    FORWARD_PRE_HOOKS,
    PARAMETERS,
    NormBase,
    forward_hooks,
    forward_pre_hooks,
    own_buffers,
    own_children,
    own_parameters,
)
from lightning_vram.private_names.torch.tensors import is_view, num_writes

_ALWAYS_COPIED_BYTES = MIB  # larger buffers are copied beforehand only where they are known to be written
_COPIED_KINDS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
_MAX_COPIED_ITEMS = 1000  # a vocabulary, say, would cost more than the forward
_MAX_COPIED_DEPTH = 4


@dataclass
class WrittenBuffers:
    """What was learned about a layer in its first run: which buffers it writes.

    Args:
        names: Places of written buffers, by number of the module and name; ``None`` before the first run.
        has_read_statistics: Whether it reads the running statistics of its norms.
    """

    names: set[tuple[int, str]] | None = None
    has_read_statistics: bool = False


@dataclass
class _Buffer:
    tensor: Tensor
    version: int
    start: Tensor | None  # its value before the forward, if it is kept


class _LeafState:
    """A layer of torch's own without buffers, hooks or children: only its mode and its parameters can change."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.is_training = module.training
        self.parameters = own_parameters(module).copy()
        self.requires_grad = [p is not None and p.requires_grad for p in self.parameters.values()]

    def rewind(self) -> Callable[[], None]:
        """Put the state from before the first run back; returns what undoes that."""
        attributes = vars(self.module)  # nn.Module's own way to set attributes is slow
        is_training, registered = attributes["training"], attributes[PARAMETERS]
        now = [(p, p.data, p.requires_grad) for p in registered.values() if p is not None and not is_shard(p)]
        attributes["training"] = self.is_training
        attributes[PARAMETERS] = parameters = _keep_sharded(self.parameters, registered)
        hooks = attributes[FORWARD_HOOKS], attributes[FORWARD_PRE_HOOKS]
        attributes[FORWARD_HOOKS], attributes[FORWARD_PRE_HOOKS] = OrderedDict(), OrderedDict()  # as it was
        for parameter, requires_grad in zip(parameters.values(), self.requires_grad, strict=False):
            _set_requires_grad(parameter, requires_grad)

        def restore() -> None:
            attributes["training"] = is_training
            attributes[PARAMETERS] = registered
            attributes[FORWARD_HOOKS], attributes[FORWARD_PRE_HOOKS] = hooks
            for parameter, data, requires_grad in now:
                if _place(parameter) != _place(data):
                    parameter.data = data
                _set_requires_grad(parameter, requires_grad)

        return restore


class _ModuleState(_LeafState):
    """Any module: everything in its ``__dict__``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.attributes = {name: _copy_plain(value) for name, value in vars(module).items()}
        self.generators = _read_generators(vars(module))
        self.buffers: dict[str, _Buffer] = {}

    def rewind_all(self, stand_ins: dict[int, Tensor]) -> Callable[[], None]:
        """As ``rewind``, with buffers on copies; ``stand_ins`` has those made so far, by tensor."""
        module, now = self.module, dict(vars(self.module))  # with the very objects: handles of hooks refer to them
        generators = _read_generators(now)
        restore_leaf = self.rewind()
        attributes = {name: _copy_plain(value) for name, value in self.attributes.items()}
        attributes[PARAMETERS] = own_parameters(module)
        buffers = self.attributes[BUFFERS].items()
        attributes[BUFFERS] = {name: self._stand_in(name, buffer, stand_ins) for name, buffer in buffers}
        # Views of other tensors stay as they are: FSDP1 sets parameters that way.
        attributes |= {name: value for name, value in now.items() if isinstance(value, Tensor) and is_view(value)}
        _replace(vars(module), attributes)
        for name, position in self.generators.items():
            vars(module)[name].set_state(position)

        def restore() -> None:
            restore_leaf()
            _replace(vars(module), now)
            for name, position in generators.items():
                vars(module)[name].set_state(position)

        return restore

    def _stand_in(self, name: str, buffer: Tensor | None, stand_ins: dict[int, Tensor]) -> Tensor | None:
        if buffer is None:
            return None
        kept = self.buffers.get(name)
        start = kept.start if kept is not None else buffer  # no account is kept of statistics
        if start is None:
            return buffer
        if id(buffer) not in stand_ins:  # one tensor under two names stays one
            stand_ins[id(buffer)] = _copy(start)  # a copy of the copy: a retained graph may be recomputed again
        return stand_ins[id(buffer)]


class ModuleSnapshot:
    """The state of modules before a forward; as a context manager, the time in which it runs again.

    Args:
        modules: Modules whose forward runs, with their children.
        written: What is known about their buffers; filled in after the first run.
    """

    def __init__(self, modules: Sequence[nn.Module], written: WrittenBuffers) -> None:
        self._written = written
        # In the first run all buffers are copied: whether it reads its statistics is not known yet.
        self._counts_statistics = written.names is None or written.has_read_statistics
        self._modules = modules
        members = dict.fromkeys(member for module in modules for member in module.modules())
        members = {member: None for member in members if not isinstance(member, OptimizedModule)}  # a mere shell
        self._leaves = [_LeafState(member) for member in members if _is_simple_leaf(member)]
        self._states = [_ModuleState(member) for member in members if not _is_simple_leaf(member)]
        for number, state in enumerate(self._states):
            for name, buffer in state.attributes[BUFFERS].items():
                if buffer is not None and (self._counts_statistics or not _is_statistic(state.module, name)):
                    start = _copy(buffer) if self._may_be_written(number, name, buffer) else None
                    state.buffers[name] = _Buffer(buffer, _version(buffer), start)
        self._restores: list[Callable[[], None]] = []

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
        for number, state in enumerate(self._states):
            for name, buffer in state.buffers.items():
                is_written = (
                    (number, name) in known
                    or own_buffers(state.module).get(name) is not buffer.tensor
                    or _version(buffer.tensor) != buffer.version
                    or (is_first and differs(buffer.tensor, buffer.start))
                )
                if not is_written:
                    buffer.start = None
                elif buffer.start is None:
                    raise RuntimeError(
                        f"layer {type(self._states[0].module).__name__} writes its buffer {name!r} in some forwards "
                        "and not in others, and cannot be recomputed. Choose other layers to checkpoint."
                    )
                else:
                    known.add((number, name))

    def __enter__(self) -> None:
        stand_ins: dict[int, Tensor] = {}
        self._restores += [leaf.rewind() for leaf in self._leaves]
        self._restores += [state.rewind_all(stand_ins) for state in self._states]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._restores:
            self._restores.pop()()

    def _may_be_written(self, number: int, name: str, buffer: Tensor) -> bool:
        names = self._written.names
        return names is None or (number, name) in names or buffer.nbytes <= _ALWAYS_COPIED_BYTES


def _is_simple_leaf(module: nn.Module) -> bool:
    is_stock = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    is_leaf = not (own_children(module) or own_buffers(module))
    return is_stock and is_leaf and not (forward_pre_hooks(module) or forward_hooks(module))


def _read_generators(attributes: dict[str, Any]) -> dict[str, Tensor]:
    # Not isinstance: torch.Generator's is slow, and this is asked of every attribute.
    return {name: value.get_state() for name, value in attributes.items() if type(value) is torch.Generator}


def _copy_plain(value: Any, depth: int = 0) -> Any:
    """A copy of plain containers and of those inside them; anything else as it is."""
    kind = type(value)
    if kind not in _COPIED_KINDS or len(value) > _MAX_COPIED_ITEMS or depth > _MAX_COPIED_DEPTH:
        return value
    twin = value.copy()
    if kind is set:
        return twin
    for place, item in twin.items() if isinstance(twin, dict) else enumerate(twin):
        if type(item) in _COPIED_KINDS:
            twin[place] = _copy_plain(item, depth + 1)
    return twin


def _replace(attributes: dict[str, Any], others: dict[str, Any]) -> None:
    attributes.update(others)
    for name in [name for name in attributes if name not in others]:
        del attributes[name]


def _keep_sharded(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Parameters from before, but where FSDP2 moves sharded and unsharded ones in and out: those that stand there."""
    is_same = list(map(id, before.values())) == list(map(id, now.values()))
    if is_same or any(map(is_shard, (*before.values(), *now.values()))):
        return now
    return before.copy()


def _is_statistic(module: nn.Module, name: str) -> bool:
    """Running statistics of torch's own norms: written while training, without a trace in the version, but not read."""
    return isinstance(module, NormBase) and type(module).forward.__module__.startswith("torch.nn.modules.")


def _set_requires_grad(parameter: Tensor | None, requires_grad: bool) -> None:  # noqa: FBT001
    if parameter is not None and parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


def _place(tensor: Tensor) -> tuple[int, int]:
    return storage_address(tensor), int(tensor.storage_offset())  # not data_ptr(): fake tensors have none


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else num_writes(tensor)


def differs(tensor: Tensor, start: Tensor | None) -> bool:
    """Whether a tensor was written past its version counter, through ``.data`` or by a kernel that does not tell."""
    is_plain = (
        type(tensor) in (Tensor, nn.Buffer) or type(tensor) in PARAMETER_CLASSES
    ) and tensor.layout is torch.strided
    if start is None or not is_plain or tensor.is_meta or tensor.is_nested or torch.equal(tensor, start):
        return False
    return not bool(((tensor == start) | ((tensor != tensor) & (start != start))).all())  # NaN is not a change


def iterate_floating_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of ``module`` that are neither masks nor statistics of torch's own norms."""
    for member in module.modules():
        for name, buffer in own_buffers(member).items():
            if buffer is not None and buffer.dtype not in (torch.bool, torch.uint8) and not _is_statistic(member, name):
                yield buffer
