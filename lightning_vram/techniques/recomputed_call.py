"""One call of a layer that is run again in the backward, with everything in place for the second run.

The work is done by :func:`torch.utils.checkpoint.checkpoint` (non-reentrant). What is ours: modules and host random
numbers are as in the first run (:mod:`~lightning_vram.techniques.module_snapshot`); tensors count as inputs wherever
they are passed, by keyword or deep inside, so that the random state of their device is kept and an input overwritten
before the backward is an error; the objects and containers of the caller are written by the first run only; results of
chosen operators are taken from the first run (:mod:`~lightning_vram.techniques.kept_outputs`); and a second run that
does something else is noticed (:mod:`~lightning_vram.techniques.determinism`).
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from lightning_vram.memory.module_scope import module_scope
from lightning_vram.memory.storages import iterate_storages
from lightning_vram.techniques.determinism import OperatorTrace, OutputSamples
from lightning_vram.techniques.host_random import DrawnNumbers, HostRandomState
from lightning_vram.techniques.kept_outputs import KeptOutputs, RecomputationError
from lightning_vram.techniques.module_snapshot import ModuleSnapshot, WrittenBuffers, differs
from lightning_vram.techniques.save_policy import SavePolicy
from lightning_vram.techniques.saved_output import SavedOutput
from lightning_vram.techniques.watched_saves import SaveWatch

Forward = Callable[..., Any]
DeterminismCheck = Literal["outputs", "operators", "none"]
_DIFFERENCES = ("different metadata", "different number of tensors", "more tensors")  # in torch's words


@dataclass
class Observation:
    """What the first call of a layer taught about it.

    Args:
        written: Buffers it writes.
        drawn: Random numbers it draws.
        overwrites_inputs: Whether it writes its input tensors in place; ``None`` before the first call.
        num_kept: Results of operators it kept in its last call, besides its inputs.
    """

    written: WrittenBuffers = field(default_factory=WrittenBuffers)
    drawn: DrawnNumbers = field(default_factory=DrawnNumbers)
    overwrites_inputs: bool | None = None
    num_kept: int | None = None


@dataclass(frozen=True)
class Recomputing:
    """How a layer is recomputed.

    Args:
        name: Of the layer, for messages.
        save: Results of operators that the second run takes from the first; ``None``: it gets the inputs only.
        determinism_check: ``"outputs"`` compares what the layer returns in the second run of its first call;
            ``"operators"`` compares all operators of each call; ``"none"`` nothing, not even shapes.
        watch: Is told what the layer does.
    """

    name: str
    save: SavePolicy | None = None
    determinism_check: DeterminismCheck = "outputs"
    watch: "CallWatch | None" = None


class CallWatch(Protocol):
    """Whoever wants to know what a layer does."""

    def call(self, leaves: Sequence[Any]) -> AbstractContextManager[None]:
        """Return a context for a whole call with these arguments, from before anything is saved for it."""

    def inside(self) -> AbstractContextManager[None]:
        """Return a context for the first run of the layer's forward."""

    def on_recomputation(self) -> None:
        """Called before the second run."""


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
            backward, a :class:`~lightning_vram.techniques.kept_outputs.RecomputationError` if the second run is not
            what the first was.
    """
    if observation.overwrites_inputs is None and _has_lazy(modules):
        args, kwargs = arguments
        return forward(*args, **kwargs)  # draws its weights in this call, as a second run would not
    if recomputing.watch is None:
        return _call(modules, forward, arguments, observation, recomputing)
    with recomputing.watch.call(tree_leaves(arguments)):
        return _call(modules, forward, arguments, observation, recomputing)


def _call(
    modules: Sequence[nn.Module],
    forward: Forward,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    observation: Observation,
    recomputing: Recomputing,
) -> Any:
    leaves, structure = tree_flatten(arguments)
    kept = [_keep(leaf, observation.overwrites_inputs) for leaf in leaves]
    versions = [_version(leaf) for leaf in leaves]
    snapshot, host_random = ModuleSnapshot(modules, observation.written), HostRandomState(observation.drawn)
    runs = _Runs(recomputing, is_first=observation.overwrites_inputs is None)
    first_call = [arguments]
    del arguments

    def run(*kept: Any) -> Any:
        if not first_call:
            again = [_give(leaf, is_overwritten=observation.overwrites_inputs) for leaf in kept[: structure.num_leaves]]
            args, kwargs = tree_unflatten(again, structure)
            with module_scope(modules[0]):
                return runs.second(lambda: forward(*args, **kwargs))
        args, kwargs = first_call.pop()
        output = runs.first(lambda: forward(*args, **kwargs))
        snapshot.settle()
        host_random.settle()
        return output

    with runs.without_early_stop():
        output = checkpoint(
            run,
            *kept,
            *_device_witness(modules, kept),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _Together(snapshot, host_random)),
            determinism_check="none" if recomputing.determinism_check == "none" else "default",
        )
    is_overwritten = any(version != _version(leaf) for version, leaf in zip(versions, leaves, strict=True))
    is_overwritten |= any(leaf.is_overwritten() for leaf in kept if isinstance(leaf, _FirstInput))
    _check_overwritten(recomputing.name, leaves, observation, is_overwritten=is_overwritten)
    observation.overwrites_inputs = bool(observation.overwrites_inputs) or is_overwritten
    for leaf in kept:
        if isinstance(leaf, _FirstInput):
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


class _Runs:
    """The runs of one call: sees to it that the second is what the first was, or that the user gets to know."""

    def __init__(self, recomputing: Recomputing, *, is_first: bool) -> None:
        check = recomputing.determinism_check
        self._name = recomputing.name
        self._watch = recomputing.watch
        self._compares_outputs = is_first and check == "outputs"
        self._samples: OutputSamples | None = None
        self._trace = OperatorTrace() if check == "operators" else None
        self._outputs = KeptOutputs(recomputing.save) if recomputing.save is not None else None

    def without_early_stop(self) -> AbstractContextManager[None]:
        """For a call whose second run is compared: it has to get to the end."""
        is_enabled = False
        is_compared = self._compares_outputs or self._trace is not None
        return set_checkpoint_early_stop(is_enabled) if is_compared else nullcontext()

    def first(self, run: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            stack.enter_context(SaveWatch(_ignore, self._explain).hooks())
            if self._watch is not None:
                stack.enter_context(self._watch.inside())
            if self._outputs is not None:
                stack.enter_context(self._outputs.recording())
            if self._trace is not None:
                stack.enter_context(self._trace)
            output = run()
        if self._compares_outputs:
            self._samples = OutputSamples(output)
        return output

    def second(self, run: Callable[[], Any]) -> Any:
        if self._watch is not None:
            self._watch.on_recomputation()
        try:
            with ExitStack() as stack:
                if self._outputs is not None:
                    stack.enter_context(self._outputs.replaying())
                if self._trace is not None:
                    stack.enter_context(self._trace.comparing())
                output = run()
        except RecomputationError as error:
            raise self._error(f"{error}.", is_named=True) from None
        if self._samples is not None and self._samples.differ_from(output):
            raise self._error("it returned other values than in its first run.")
        return output

    def settle(self) -> int:
        """Call after the first run, outside of the checkpoint; returns how many results are kept."""
        return self._outputs.settle() if self._outputs is not None else 0

    def _explain(self, error: RuntimeError) -> RuntimeError:
        text = str(error)
        if not isinstance(error, CheckpointError) or not any(part in text for part in _DIFFERENCES):
            return error
        return self._error(text.partition("\n\nTip:")[0].removeprefix("torch.utils.checkpoint: "))

    def _error(self, reason: str, *, is_named: bool = False) -> RecomputationError:
        tip = "" if is_named else " determinism_check='operators' names the operator that differs."
        return RecomputationError(
            f"layer {self._name} did not do the same when it was recomputed: {reason} Gradients would be wrong. "
            "Does it draw random numbers from elsewhere than torch, Python or NumPy's global generator, or depend on "
            f"something that changes between forward and backward?{tip} Leave the layer out of checkpointing, or pass "
            "determinism_check='none' if the difference is meant."
        )


def _ignore(tensor: Tensor) -> None:
    """Nothing is to be known about what is saved."""


class _FirstInput:
    """A tensor in a layer's first call, which may overwrite it: an in-place activation comes first in some layers.

    Neither the tensor nor a copy alone will do: the tensor may be gone after the call, and copies of all inputs of all
    layers may not fit. So both are kept while the layer runs, and the one that is needed from then on.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = _version(tensor)
        self._copy: Tensor | None = _copy_tensor(tensor)  # what the layer found
        self._shape, self._requires_grad = tensor.shape, tensor.requires_grad
        self._saved: SavedOutput | None = None

    def is_overwritten(self) -> bool:
        return _version(self._tensor) != self._version or differs(self._now, self._copy)

    def settle(self) -> None:
        needed = self._copy if self._copy is not None and self.is_overwritten() else self._now
        self._saved = SavedOutput(needed.detach())
        self._tensor = self._copy = None

    def read(self) -> Tensor:
        tensor = self._saved.give() if self._saved is not None else self._now
        if tensor is None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"an input of shape {list(self._shape)} of a layer that is recomputed."
            )
        return tensor.detach().requires_grad_(self._requires_grad)

    @property
    def _now(self) -> Tensor:
        assert self._tensor is not None
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
