"""One call of a layer that is run again in the backward, with everything in place for the second run.

The work is done by :func:`torch.utils.checkpoint.checkpoint` (non-reentrant). What is ours: modules and host random
numbers are as in the first run (:mod:`~lightning_vram.techniques.module_snapshot`); tensors count as inputs wherever
they are passed, by keyword or deep inside, so that the random state of their device is kept and an input overwritten
before the backward is an error; and the objects and containers of the caller are written by the first run only.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from lightning_vram.memory.module_scope import module_scope
from lightning_vram.memory.storages import iterate_storages
from lightning_vram.techniques.host_random import DrawnNumbers, HostRandomState
from lightning_vram.techniques.module_snapshot import ModuleSnapshot, WrittenBuffers, differs

Forward = Callable[..., Any]


@dataclass
class Observation:
    """What the first call of a layer taught about it.

    Args:
        written: Buffers it writes.
        drawn: Random numbers it draws.
        overwrites_inputs: Whether it writes its input tensors in place; ``None`` before the first call.
    """

    written: WrittenBuffers = field(default_factory=WrittenBuffers)
    drawn: DrawnNumbers = field(default_factory=DrawnNumbers)
    overwrites_inputs: bool | None = None


def call_recomputed(
    layer: nn.Module,
    modules: Sequence[nn.Module],
    forward: Forward,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    observation: Observation,
) -> Any:
    """Call ``forward`` and keep its inputs only; the backward calls it again.

    Args:
        layer: The layer, for names.
        modules: The modules that ``forward`` runs.
        forward: What to call.
        arguments: Positional and keyword arguments.
        observation: What is known about the layer; filled in by the first call.

    Returns:
        What ``forward`` returns.

    Raises:
        RuntimeError: If the layer overwrites an input or a large buffer in this call, but did not in its first.
    """
    if observation.overwrites_inputs is None and _has_lazy(modules):
        args, kwargs = arguments
        return forward(*args, **kwargs)  # draws its weights in this call, as a second run would not
    leaves, structure = tree_flatten(arguments)
    kept = [_keep(leaf, observation.overwrites_inputs) for leaf in leaves]
    versions = [_version(leaf) for leaf in leaves]
    snapshot, host_random = ModuleSnapshot(modules, observation.written), HostRandomState(observation.drawn)
    first_call = [arguments]
    del arguments

    def run(*kept: Any) -> Any:
        if not first_call:
            again = [_give(leaf, is_overwritten=observation.overwrites_inputs) for leaf in kept[: structure.num_leaves]]
            args, kwargs = tree_unflatten(again, structure)
            with module_scope(layer):
                return forward(*args, **kwargs)
        args, kwargs = first_call.pop()
        output = forward(*args, **kwargs)
        snapshot.settle()
        host_random.settle()
        return output

    output = checkpoint(
        run,
        *kept,
        *_device_witness(modules, kept),
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), _Together(snapshot, host_random)),
    )
    is_overwritten = any(version != _version(leaf) for version, leaf in zip(versions, leaves, strict=True))
    is_overwritten |= any(leaf.is_overwritten() for leaf in kept if isinstance(leaf, _FirstInput))
    if is_overwritten and _share_memory([leaf for leaf in leaves if isinstance(leaf, Tensor)]):
        raise RuntimeError(
            f"layer {type(layer).__name__} overwrites an input that shares memory with another of its inputs, and "
            "cannot be recomputed. Choose an outer layer to checkpoint."
        )
    if is_overwritten and observation.overwrites_inputs is False:
        raise RuntimeError(
            f"layer {type(layer).__name__} overwrites its input in some forwards and not in others, and cannot be "
            "recomputed. Choose other layers to checkpoint."
        )
    observation.overwrites_inputs = bool(observation.overwrites_inputs) or is_overwritten
    for leaf in kept:
        if isinstance(leaf, _FirstInput):
            leaf.settle()
    return output


class _FirstInput:
    """A tensor in a layer's first call, which may overwrite it: an in-place activation comes first in some layers.

    Neither the tensor nor a copy alone will do: the tensor may be gone after the call, and copies of all inputs of all
    layers may not fit. So both are kept while the layer runs, and the one that is needed from then on.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = _version(tensor)
        self._copy: Tensor | None = _copy_tensor(tensor)  # what the layer found

    def is_overwritten(self) -> bool:
        return _version(self._tensor) != self._version or differs(self._tensor, self._copy)

    def settle(self) -> None:
        if self._copy is not None and self.is_overwritten():
            self._tensor = self._copy
            self._version = _version(self._tensor)
        self._copy = None

    def read(self) -> Tensor:
        if _version(self._tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"an input of shape {list(self._tensor.shape)} of a layer that is recomputed."
            )
        return self._tensor


def _keep(leaf: Any, overwrites_inputs: bool | None) -> Any:  # noqa: FBT001 - three states
    """What stays of an argument until the second run."""
    if not isinstance(leaf, Tensor):
        return _copy_object(leaf)
    if overwrites_inputs is None:
        return _FirstInput(leaf)
    return _copy_tensor(leaf) if overwrites_inputs else leaf


def _give(leaf: Any, *, is_overwritten: bool | None) -> Any:
    """What the second run gets: it must not overwrite what is kept, a retained graph needs it again."""
    tensor = leaf.read() if isinstance(leaf, _FirstInput) else leaf
    if not isinstance(tensor, Tensor):
        return _copy_object(tensor)
    return tensor.clone() if is_overwritten else tensor


class _Together:
    """Several contexts as one that can be entered again: a retained graph is recomputed more than once."""

    def __init__(self, *contexts: AbstractContextManager[None]) -> None:
        self._contexts = contexts
        self._stack = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def _copy_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copy_object(leaf: Any) -> Any:
    """A shallow copy of an object that carries data, such as a graph or a dataclass; anything else as it is."""
    is_data = (
        hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module | type | Enum) and not callable(leaf)
    )
    if not is_data:
        return leaf
    try:
        return copy.copy(leaf)
    except Exception:  # an object that cannot be copied is used as it is
        return leaf


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    storages = [id(storage) for tensor in tensors for storage, _ in iterate_storages(tensor)]
    return len(set(storages)) < len(storages)


def _has_lazy(modules: Sequence[nn.Module]) -> bool:
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return any(map(is_lazy, tensors))


def _version(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def _device_witness(modules: Sequence[nn.Module], kept: Sequence[Any]) -> tuple[Tensor, ...]:
    """An empty tensor on the layer's device, where no argument lies there.

    The checkpoint keeps the random state of the devices of its tensor arguments: a layer that gets its tensors inside
    an object of the user's would draw another dropout mask the second time.
    """
    parameter = next((p for module in modules for p in module.parameters()), None)
    if parameter is None or parameter.device.type in ("cpu", "meta"):
        return ()
    if any(isinstance(leaf, Tensor) and leaf.device == parameter.device for leaf in kept):
        return ()
    return (torch.empty(0, device=parameter.device),)
