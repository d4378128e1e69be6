"""One call of a layer that is run again in the backward, with everything in place for the second run.

The work is done by :func:`torch.utils.checkpoint.checkpoint` (non-reentrant). What is ours: modules and host random
numbers are as in the first run (:mod:`~lightning_vram.core.rollback.module_snapshot`); tensors count as inputs wherever
they are passed, by keyword or deep inside, so that the random state of their device is kept and an input overwritten
before the backward is an error; the objects and containers of the caller are written by the first run only; results of
chosen operators are taken from the first run (``selective.py``); and a second run that
does something else is noticed (:mod:`~lightning_vram.techniques.activation_checkpointing.determinism`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from lightning_vram.core.hooks.stage import exact_only
from lightning_vram.core.random_state.host import DrawnNumbers, HostRandomState
from lightning_vram.core.rollback.module_snapshot import ModuleSnapshot, WrittenBuffers
from lightning_vram.core.tensors.nests import flatten_arguments
from lightning_vram.core.tensors.versions import version_of
from lightning_vram.memory.tracking.following import module_scope
from lightning_vram.memory.tracking.storages import iterate_storages
from lightning_vram.techniques.activation_checkpointing.kept_arguments import (
    FirstInput,
    give_argument,
    give_attributes,
    keep_argument,
    keep_attributes,
)
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_checkpointing.two_runs import First, LayerRuns, Recomputing

Forward = Callable[..., Any]


@dataclass
class Observation:
    """What the first call of a layer taught about it.

    Args:
        written: Buffers it writes.
        drawn: Random numbers it draws.
        overwrites_inputs: Whether it writes its input tensors in place; ``None`` before the first call.
        num_kept: Results of operators it kept in its last call, besides its inputs.
        checked: The policies with which a call of it was compared to its second run.
    """

    written: WrittenBuffers = field(default_factory=WrittenBuffers)
    drawn: DrawnNumbers = field(default_factory=DrawnNumbers)
    overwrites_inputs: bool | None = None
    num_kept: int | None = None
    checked: set[SavePolicy | None] = field(default_factory=set)

    def note_call(self, save: SavePolicy | None) -> First | None:
        """Note a call with this policy; returns what it is the first of."""
        first = First.ALL if not self.checked else First.POLICY if save not in self.checked else None
        self.checked.add(save)
        return first


def call_recomputed(
    modules: Sequence[nn.Module],
    forward: Forward,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    observation: Observation,
    recomputing: Recomputing,
) -> Any:
    """Call ``forward`` and keep its inputs only; the backward calls it again.

    Args:
        modules: The modules that ``forward`` runs.
        forward: What to call.
        arguments: Positional and keyword arguments.
        observation: What is known about the layer; filled in by the first call.
        recomputing: What is kept and what is checked.

    Returns:
        What ``forward`` returns.

    Raises:
        RuntimeError: If the layer overwrites an input or a large buffer in this call, but did not in its first. In the
            backward, a ``RecomputationError`` if the second run is
            not what the first was.
    """
    if observation.overwrites_inputs is None and _has_lazy(modules):
        args, kwargs = arguments
        return forward(*args, **kwargs)  # draws its weights in this call, as a second run would not
    if recomputing.watch is None:
        return _call(modules, forward, arguments, observation, recomputing)
    with recomputing.watch.call(flatten_arguments(arguments)[0]):
        return _call(modules, forward, arguments, observation, recomputing)


def _call(
    modules: Sequence[nn.Module],
    forward: Forward,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    observation: Observation,
    recomputing: Recomputing,
) -> Any:
    leaves, rebuild = flatten_arguments(arguments)
    num_leaves = len(leaves)
    kept = [keep_argument(leaf, observation.overwrites_inputs) for leaf in leaves]
    attributes = keep_attributes(leaves)
    versions = [_version(leaf) for leaf in leaves]
    snapshot, host_random = ModuleSnapshot(modules, observation.written), HostRandomState(observation.drawn)
    runs = LayerRuns(modules, recomputing, observation.note_call(recomputing.save))
    first_call = [arguments]
    del arguments

    def run(*kept: Any) -> Any:
        if not first_call:
            again = [give_argument(leaf, is_overwritten=observation.overwrites_inputs) for leaf in kept[:num_leaves]]
            args, kwargs = rebuild(list(map(give_attributes, again, attributes)))
            with module_scope(modules[0]):
                return runs.second(lambda: forward(*args, **kwargs))
        args, kwargs = first_call.pop()
        with snapshot.watching():
            output = runs.first(lambda: forward(*args, **kwargs))
        snapshot.settle()
        host_random.settle()
        return output

    with runs.without_early_stop(), exact_only():
        output = checkpoint(
            run,
            *kept,
            *_device_witness(modules, kept),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _Together(snapshot, host_random)),
            determinism_check="none" if recomputing.determinism_check == "none" else "default",
        )
    is_overwritten = any(version != _version(leaf) for version, leaf in zip(versions, leaves, strict=True))
    is_overwritten |= any(leaf.is_overwritten() for leaf in kept if isinstance(leaf, FirstInput))
    _check_overwritten(recomputing.name, leaves, observation, is_overwritten=is_overwritten)
    observation.overwrites_inputs = bool(observation.overwrites_inputs) or is_overwritten
    with exact_only():
        for leaf in kept:
            if isinstance(leaf, FirstInput):
                leaf.settle()
        observation.num_kept = runs.settle()
    return output


def _check_overwritten(name: str, leaves: Sequence[Any], observation: Observation, *, is_overwritten: bool) -> None:
    if is_overwritten and _share_memory([leaf for leaf in leaves if isinstance(leaf, Tensor)]):
        raise RuntimeError(
            f"layer {name} overwrites an input that shares memory with another of its inputs, and "
            "cannot be recomputed. Choose an outer layer to checkpoint."
        )
    if is_overwritten and observation.overwrites_inputs is False:
        raise RuntimeError(
            f"layer {name} overwrites its input in some forwards and not in others, and cannot be "
            "recomputed. Choose other layers to checkpoint."
        )


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


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    storages = [id(storage) for tensor in tensors for storage, _ in iterate_storages(tensor)]
    return len(set(storages)) < len(storages)


def _has_lazy(modules: Sequence[nn.Module]) -> bool:
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return any(map(is_lazy, tensors))


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


def _version(leaf: Any) -> int:
    return version_of(leaf) if isinstance(leaf, Tensor) else 0
