"""Let a forward run twice and count once: the second run starts where the first did, and leaves nothing behind.

Recomputation runs a forward again, and whatever the forward writes would be written twice: BatchNorm moves its running
statistics two times per step (pytorch#96136), spectral norm iterates from another start and computes another weight,
a list of auxiliary losses grows. Besides, the second run may be stopped early, as soon as it has made what the
backward needs, so what a forward sets and resets (``eval()`` and ``train()``, a weight) may stay set.

Here the modules are put back into the state from before the first run, on copies, and get their own state back
afterwards: attributes, plain lists, dicts and sets in them, buffers, generators, and which parameters stand where and
need gradients. What cannot be seen: objects of other kinds that change inside, and parameters that the forward itself
overwrites.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from lightning_vram.memory.units import MIB

_ALWAYS_COPIED_BYTES = MIB  # larger buffers are copied beforehand only where they are known to be written
_COPIED_KINDS = (list, dict, set)


@dataclass
class WrittenBuffers:
    """What was learned about a layer in its first run: which buffers it writes.

    Args:
        names: Places of written buffers, by number of the module and name; ``None`` before the first run.
    """

    names: set[tuple[int, str]] | None = None


@dataclass
class _Buffer:
    tensor: Tensor
    version: int
    start: Tensor | None  # its value before the forward, if it is kept


@dataclass
class _ModuleState:
    module: nn.Module
    attributes: dict[str, Any]
    requires_grad: dict[str, bool]
    generators: dict[str, Tensor]
    buffers: dict[str, _Buffer] = field(default_factory=dict)


class ModuleSnapshot:
    """The state of modules before a forward; as a context manager, the time in which it runs again.

    Args:
        modules: Modules whose forward runs, with their children.
        written: What is known about their buffers; filled in after the first run.
    """

    def __init__(self, modules: Sequence[nn.Module], written: WrittenBuffers) -> None:
        self._written = written
        members = dict.fromkeys(member for module in modules for member in module.modules())
        self._states = [_read_state(module) for module in members]
        for number, state in enumerate(self._states):
            for name, buffer in state.attributes["_buffers"].items():
                if buffer is not None and not _is_statistic(state.module, name):
                    start = _copy(buffer) if self._may_be_written(number, name, buffer) else None
                    state.buffers[name] = _Buffer(buffer, _version(buffer), start)
        self._exit: list[Any] = []

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
                    or state.module._buffers.get(name) is not buffer.tensor
                    or _version(buffer.tensor) != buffer.version
                    or (is_first and _differs(buffer.tensor, buffer.start))
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
        for state in self._states:
            module = state.module
            self._exit.append((module, dict(vars(module)), _read_parameters(module), _read_generators(vars(module))))
            attributes = {name: _copy_plain(value) for name, value in state.attributes.items()}
            attributes["_parameters"] = _keep_sharded(attributes["_parameters"], module._parameters)
            attributes["_buffers"] = {
                name: _stand_in(state, name, buffer, stand_ins) for name, buffer in attributes["_buffers"].items()
            }
            _keep_views(attributes, vars(module))
            _replace(vars(module), attributes)
            for name, requires_grad in state.requires_grad.items():
                _set_requires_grad(module._parameters.get(name), requires_grad)
            for name, position in state.generators.items():
                vars(module)[name].set_state(position)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._exit:
            module, attributes, parameters, generators = self._exit.pop()
            _replace(vars(module), attributes)
            for parameter, data, requires_grad in parameters:
                if parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                _set_requires_grad(parameter, requires_grad)
            for name, position in generators.items():
                vars(module)[name].set_state(position)

    def _may_be_written(self, number: int, name: str, buffer: Tensor) -> bool:
        names = self._written.names
        return names is None or (number, name) in names or buffer.nbytes <= _ALWAYS_COPIED_BYTES


def _read_state(module: nn.Module) -> _ModuleState:
    attributes = vars(module)
    return _ModuleState(
        module,
        {name: _copy_plain(value) for name, value in attributes.items()},
        {name: p.requires_grad for name, p in module._parameters.items() if p is not None},
        _read_generators(attributes),
    )


def _read_generators(attributes: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.get_state() for name, value in attributes.items() if isinstance(value, torch.Generator)}


def _read_parameters(module: nn.Module) -> list[tuple[nn.Parameter, Tensor, bool]]:
    parameters = (p for p in module._parameters.values() if p is not None)
    return [(p, p.data, p.requires_grad) for p in parameters if not isinstance(p, DTensor)]


def _copy_plain(value: Any) -> Any:
    return value.copy() if type(value) in _COPIED_KINDS else value


def _replace(attributes: dict[str, Any], others: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(others)


def _keep_sharded(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Parameters from before, but where FSDP2 moves sharded and unsharded ones in and out: those that stand there."""
    if any(isinstance(p, DTensor) for p in (*before.values(), *now.values())):
        return now
    return before


def _keep_views(attributes: dict[str, Any], now: dict[str, Any]) -> None:
    """Leave tensors that are views of others as they are: FSDP1 sets parameters that way."""
    for name, value in now.items():
        if isinstance(value, Tensor) and value._is_view():
            attributes[name] = value


def _stand_in(state: _ModuleState, name: str, buffer: Tensor | None, stand_ins: dict[int, Tensor]) -> Tensor | None:
    if buffer is None:
        return None
    kept = state.buffers.get(name)
    start = kept.start if kept is not None else buffer  # no account is kept of statistics
    if start is None:
        return buffer
    if id(buffer) not in stand_ins:  # one tensor under two names stays one
        stand_ins[id(buffer)] = _copy(start)  # a copy of the copy: a retained graph may be recomputed again
    return stand_ins[id(buffer)]


def _is_statistic(module: nn.Module, name: str) -> bool:
    """Running statistics of torch's own norms: written while training, without a trace in the version, but not read."""
    return isinstance(module, _NormBase) and type(module).forward.__module__.startswith("torch.nn.modules.")


def _set_requires_grad(parameter: Tensor | None, requires_grad: bool) -> None:  # noqa: FBT001
    if parameter is not None and parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _differs(tensor: Tensor, start: Tensor | None) -> bool:
    """Whether a tensor was written past its version counter, through ``.data`` or by a kernel that does not tell."""
    is_real = type(tensor) in (Tensor, nn.Buffer, nn.Parameter) and not tensor.is_meta
    return start is not None and is_real and not torch.equal(tensor, start)


def iterate_floating_buffers(module: nn.Module) -> Iterator[Tensor]:
    """Yield the buffers of ``module`` that are neither masks nor statistics of torch's own norms."""
    for member in module.modules():
        for name, buffer in member._buffers.items():
            if buffer is not None and buffer.dtype not in (torch.bool, torch.uint8) and not _is_statistic(member, name):
                yield buffer
