"""One call of a layer that is recomputed in the backward.

It follows the rules of non-reentrant :func:`torch.utils.checkpoint.checkpoint`: see
:mod:`~lightning_vram.core.recomputed_saves`. In addition, modules and random state are as in the first run,
inputs may be passed anywhere, results of chosen operators are taken from the first run, and a recomputation that
diverges is an error. In compiled code the compiler's partitioner does all that, under PyTorch's checkpoint.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_vram.core import recomputed_saves
from lightning_vram.core.hooks import OwnHooks, SavedOutput, exact_only, is_in_backward, save, stepping_aside
from lightning_vram.core.rollback import SAVED_COPY_BYTES, ForwardFacts, ForwardState, differs, writable_copy
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, PLAIN_TYPES, flatten_arguments, num_bytes_of
from lightning_vram.memory.storages import iterate_storages, storage_address, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.memory.tracking.tracker import module_scope
from lightning_vram.private_names.dispatcher import TO_COPY, OpOverload, hide_from_dynamo, schema_of, without_dispatch
from lightning_vram.private_names.torch import current_graph_task_id, may_stop_early, storage_key, tree_leaves, tree_map
from lightning_vram.techniques.activation_checkpointing.save_policy import (
    Recording,
    Replaying,
    SavePolicy,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class SavedArguments:
    """The arguments of a call; ``overwrites_inputs``: whether the layer writes to them, ``None`` if not known."""

    def __init__(self, arguments: Arguments, overwrites_inputs: bool | None) -> None:  # noqa: FBT001 - three states
        self._leaves, self._rebuild = flatten_arguments(arguments)
        objects = _Copies()
        self._values = [
            _keep(leaf, overwrites_inputs) if isinstance(leaf, Tensor) else objects.copy(leaf) for leaf in self._leaves
        ]
        self._inner = [(one, version_of(one)) for one in objects.tensors.values()]  # tensors in objects
        self._versions = [version_of(leaf) for leaf in self._leaves if isinstance(leaf, Tensor)]
        # What the caller has put on each tensor, as ``tensor.name = ...`` does.
        self._attributes = [dict(vars(leaf)) if type(leaf) in PLAIN_TYPES else {} for leaf in self._leaves]

    def devices(self) -> set[torch.device]:
        """Return the devices of the tensors, before :meth:`settle`."""
        return {leaf.device for leaf in self._leaves if isinstance(leaf, Tensor)}

    def settle(self, observation: "Observation", name: str) -> None:
        """Call after the layer's forward: keeps what the second run needs, under the hooks that are set.

        Learns whether the layer ``name`` overwrites its inputs, and refuses layers that cannot be recomputed.
        """
        if any(version_of(one) != version for one, version in self._inner):
            raise RuntimeError(
                f"layer {name} overwrites a tensor inside an input object, and cannot be recomputed. Let it assign a "
                "new tensor, or choose other layers to checkpoint."
            )
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        firsts = [value for value in self._values if isinstance(value, _FirstInput)]
        is_overwritten = [*map(version_of, tensors)] != self._versions or any(one.is_overwritten() for one in firsts)
        keys = [storage_key(storage) for tensor in tensors for storage, _ in iterate_storages(tensor)]
        if is_overwritten and len(set(keys)) < len(keys):
            raise RuntimeError(
                f"layer {name} overwrites an input that shares memory with another of its inputs, and "
                "cannot be recomputed. Choose an outer layer to checkpoint."
            )
        if is_overwritten and observation.overwrites_inputs is False:
            raise RuntimeError(
                f"layer {name} overwrites its input in some forwards and not in others, and cannot be "
                "recomputed. Choose other layers to checkpoint."
            )
        observation.overwrites_inputs = bool(observation.overwrites_inputs) or is_overwritten
        for value in firsts:
            value.settle()
        self._leaves, self._versions = [], []

    def give(self, *, is_overwritten: bool | None) -> Arguments:
        """Return what the second run gets; copies where it overwrites them, since a retained graph needs them again."""
        for one, version in self._inner:
            if version_of(one) != version:
                raise _overwritten(one.shape)
        objects, leaves = _Copies(), []
        for value in self._values:
            if isinstance(value, _Input | _FirstInput):
                tensor = value.read()
                leaves.append(tensor.clone() if is_overwritten else tensor)
            else:
                leaves.append(objects.copy(value))
        for leaf, attributes in zip(leaves, self._attributes, strict=True):
            if attributes and not vars(leaf):  # a new object: a copy, or what saved-tensor hooks gave back
                vars(leaf).update(attributes)
        return self._rebuild(leaves)  # type: ignore[no-any-return]


def _keep(leaf: Tensor, overwrites_inputs: bool | None) -> Any:  # noqa: FBT001
    if leaf.is_inference():
        return _Input(lambda: leaf)  # cannot be saved for a backward, and cannot change
    if overwrites_inputs is None:
        return _FirstInput(leaf)
    return _Input(save(writable_copy(leaf) if overwrites_inputs else leaf))


class _Input(NamedTuple):
    read: Callable[[], Tensor]


class _FirstInput:
    """A tensor in a layer's first call, which may overwrite it: it and a copy are kept until that is known."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Any = tensor
        self._version = version_of(tensor)
        self._copy: Tensor | None = writable_copy(tensor)  # what the layer found
        self._shape, self._requires_grad = tensor.shape, tensor.requires_grad
        self._saved: SavedOutput | None = None

    def is_overwritten(self) -> bool:
        return version_of(self._tensor) != self._version or differs(self._tensor, self._copy)

    def settle(self) -> None:
        """Call after the layer's forward: keeps what the second run needs, under the hooks that are set."""
        needed = self._copy if self._copy is not None and self.is_overwritten() else self._tensor
        self._saved = SavedOutput(needed.detach())
        self._tensor = self._copy = None

    def read(self) -> Tensor:
        """Return what the layer found. Raises ``RuntimeError``, as autograd does, if it was overwritten since."""
        tensor: Tensor | None = self._saved.give() if self._saved is not None else self._tensor
        if tensor is None:
            raise _overwritten(self._shape)
        return tensor.detach().requires_grad_(self._requires_grad)


def _overwritten(shape: torch.Size) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"an input of shape {list(shape)} of a layer that is recomputed."
    )


_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NOT_DATA = (nn.Module, type, Enum, FunctionType, MethodType, ModuleType, partial)
_CONTAINERS = (dict, list, deque, set)
_MAX_ITEMS = 1000
_MAX_DEPTH = 16


class _Copies:
    """Copies of objects, each made once, with the containers and objects in them. What cannot be copied is shared."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}  # large ones that were found, by ``id``. They are shared.
        self._made: dict[int, Any] = {}

    def copy(self, value: Any, depth: int = 0) -> Any:
        if type(value) in _PLAIN or id(value) in self._made or len(self._made) >= _MAX_ITEMS or depth > _MAX_DEPTH:
            return self._made.get(id(value), value)
        if isinstance(value, Tensor):
            return self._copy_tensor(value)
        if type(value) is tuple:
            return tuple(self.copy(item, depth + 1) for item in value)
        has_attributes = bool(type(value).__dictoffset__ and not isinstance(value, _NOT_DATA) and vars(value))
        if not (has_attributes or isinstance(value, _CONTAINERS)) or hasattr(type(value), "__del__"):
            return value
        with suppress(Exception):  # of code of others
            self._made[id(value)] = copy.copy(value)
        twin = self._made.get(id(value), value)
        if twin is value:  # cannot be copied, or returns itself, as a logger does
            return value
        if has_attributes and not hasattr(type(value), "__copy__"):  # such a class knows what belongs to a copy
            self._copy_items(vars(twin), depth + 1)
        self._copy_items(twin, depth + 1)
        return twin

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        if type(tensor) is Tensor and num_bytes_of(tensor) <= SAVED_COPY_BYTES and not tensor.is_inference():
            return self._made.setdefault(id(tensor), writable_copy(tensor))  # type: ignore[no-any-return]
        self.tensors[id(tensor)] = tensor
        return tensor

    def _copy_items(self, twin: Any, depth: int) -> None:
        if isinstance(twin, dict):  # past methods of its own: dot dicts have some
            for key, item in dict.items(twin):
                dict.__setitem__(twin, key, self.copy(item, depth))
        elif isinstance(twin, list | deque):
            kind: Any = list if isinstance(twin, list) else deque
            for place, item in enumerate(twin):
                kind.__setitem__(twin, place, self.copy(item, depth))


_UNSET = ("empty", "new_empty", "resize", "set_")  # operators that leave whatever was in the memory

_Record = tuple[Any, tuple[str, ...], Tensor | None]
"""Of an operator: itself, the shapes that it returned, and a sample of its values."""


class OperatorTrace(OperatorSubscriber):
    """Writes down every operator of a first run; :meth:`comparing` gives the mode for a second.

    It costs some ten kernels and a synchronisation per operator.
    """

    def __init__(self, buffers: Iterable[Tensor] = (), records: list[_Record] | None = None) -> None:
        # Statistics in buffers are updated in both runs: what is read from them is not compared.
        self._buffers = {storage_address(buffer) for buffer in buffers} - {0}
        self._expected = records  # of the first run; ``None`` in the first run
        self._backward = current_graph_task_id()
        self._records: list[_Record] = []

    def comparing(self) -> "OperatorTrace":
        """Return a mode that raises ``RecomputationError`` at the first operator that is not as it was here."""
        return OperatorTrace(records=self._records)

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        output = self.run(func, types, args, kwargs)
        is_inner = current_graph_task_id() != self._backward  # a backward inside of the layer
        is_cast = func is TO_COPY and type(args[0]) in PARAMETER_CLASSES  # which autocast keeps
        is_question = getattr(func, "namespace", "") == "prim" or str(func).startswith("aten.detach")  # or our own
        if is_inner or is_cast or is_question or not PLAIN_TYPES.issuperset(types):
            return output
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), None)
        # An integer that is moved in place goes on in the second run, as norms count their batches.
        is_mutable = isinstance(func, OpOverload) and schema_of(func).is_mutable
        is_counter = is_mutable and first is not None and not first.is_floating_point()
        is_moving = bool(args) and isinstance(args[0], Tensor) and storage_address(args[0]) in self._buffers
        is_compared = not (is_counter or is_moving or any(part in str(func) for part in _UNSET))
        with without_dispatch():  # other modes are not to see our own operators
            record = (func, _describe(output), recomputed_saves.take_sample(first) if is_compared else None)
            self._records.append(record)
            if self._expected is not None:
                self._compare(record, len(self._records) - 1)
        return output

    def _compare(self, record: _Record, number: int) -> None:
        assert self._expected is not None
        function, shapes, sample = record
        if number >= len(self._expected):
            raise recomputed_saves.RecomputationError(f"it ran {function} after the last operator of the forward")
        (expected, expected_shapes, expected_sample), place = self._expected[number], f"operator {number + 1}"
        if (function, shapes) != (expected, expected_shapes):
            was, now = f"{expected} -> {', '.join(expected_shapes)}", f"{function} -> {', '.join(shapes)}"
            raise recomputed_saves.RecomputationError(f"{place} was {was} and is {now}")
        if expected_sample is not None and not recomputed_saves.is_close(expected_sample, sample):
            raise recomputed_saves.RecomputationError(f"{place}, {function}, returned other values than it returns now")


def _describe(output: Any) -> tuple[str, ...]:
    leaves = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return tuple(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in leaves)


DeterminismCheck = Literal["outputs", "operators", "none"]


@dataclass(frozen=True)
class CallWatch:
    """Callbacks of an observer of one layer."""

    # gets the arguments of a call; returns a context for all of it, from before anything is saved for it
    call: Callable[[Sequence[Any]], AbstractContextManager[None]]
    inside: Callable[[], AbstractContextManager[None]]  # returns a context for the first run of the layer's forward
    on_recomputation: Callable[[], None]  # called before the second run


@dataclass(frozen=True)
class Recomputing:
    """How a layer is recomputed."""

    name: str  # of the layer, for messages
    # results of operators that the second run takes from the first; ``None``: it gets the inputs only
    save: SavePolicy | None = None
    # ``"outputs"`` compares samples of what autograd saves, in calls 1, 2, 4, 8, ... of the layer; ``"operators"``
    # compares all operators of each call; ``"none"`` nothing, not even shapes.
    determinism_check: DeterminismCheck = "outputs"
    watch: CallWatch | None = None


@dataclass
class Observation:
    """What is known about a layer from its earlier calls."""

    learned: ForwardFacts = field(default_factory=ForwardFacts)  # what it writes and draws
    # whether it writes its input tensors in place; ``None`` before the first call
    overwrites_inputs: bool | None = None
    num_kept: int | None = None  # results of operators it kept in its last call, besides its inputs
    # how often it was called, by what is kept, and whether it was in a backward
    counts: Counter[tuple[SavePolicy | None, bool]] = field(default_factory=Counter)


class _Call:
    """The two runs of one call; an error says where the second differs from the first."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        forward: Callable[..., Any],
        arguments: Arguments,
        observation: Observation,
        recomputing: Recomputing,
    ) -> None:
        self._modules, self._forward = modules, forward
        self._observation, self._recomputing = observation, recomputing
        self._kept = SavedArguments(arguments, observation.overwrites_inputs)
        self._state = ForwardState(modules, observation.learned, self._kept.devices())
        check, save = recomputing.determinism_check, recomputing.save
        kind = save, is_in_backward()  # where a checkpoint around it recomputes: counted apart
        observation.counts[kind] += 1
        buffers = (buffer for module in modules for buffer in module.buffers())
        is_sampled = check == "outputs" and recomputed_saves.is_due(observation.counts[kind])
        self._samples = recomputed_saves.SavedSamples(buffers) if is_sampled else None
        self._trace = OperatorTrace(buffers) if check == "operators" else None
        self._places: list[ref[recomputed_saves.Placeholder]] = []
        self._recording = Recording(save, self._places) if save is not None else None

    def first(self, arguments: Arguments) -> Any:
        """Call the forward, and keep what the second run needs."""
        saves = recomputed_saves.RecomputedSaves(
            lambda run: self._state.run(partial(self._second, run)),
            self._places,
            self._error,
            compares_kinds=self._recomputing.determinism_check != "none",
            stops_early=self._trace is None and may_stop_early(),
            samples=self._samples,
        )
        watch = self._recomputing.watch
        args, kwargs = arguments
        with _inside(saves, watch.inside() if watch is not None else None, self._recording, self._trace):
            output = self._forward(*args, **kwargs)
        saves.is_complete = True
        self._state.settle()
        self._kept.settle(self._observation, self._recomputing.name)
        if self._samples is not None:
            self._samples.settle()
        self._observation.num_kept = self._recording.settle() if self._recording is not None else 0
        return output

    def _second(self, run: recomputed_saves.RecomputationHooks) -> None:
        args, kwargs = self._kept.give(is_overwritten=self._observation.overwrites_inputs)
        replaying = Replaying(self._recording) if self._recording is not None else None
        comparing = self._trace.comparing() if self._trace is not None else None
        with module_scope(self._modules[0]):
            if self._recomputing.watch is not None:
                self._recomputing.watch.on_recomputation()
            try:
                with _inside(run, replaying, comparing):
                    self._forward(*args, **kwargs)
            except recomputed_saves.RecomputationError as error:
                raise self._error(f"{error}.", is_named=True) from None

    def _error(self, reason: str, *, is_named: bool = False) -> recomputed_saves.RecomputationError:
        tip = "" if is_named else "determinism_check='operators' names the operator that differs. "
        way_out = (
            "Leave the layer out of checkpointing, or pass determinism_check='none' if the difference is intended."
        )
        return recomputed_saves.divergence_error(self._recomputing.name, reason, tip + way_out)


@contextmanager
def _inside(hooks: OwnHooks, *others: AbstractContextManager[Any] | None) -> Iterator[None]:
    """Enter hooks, then what else there is."""
    with hooks, stepping_aside(hooks), ExitStack() as stack:
        for other in filter(None, others):
            stack.enter_context(other)
        yield


@hide_from_dynamo  # as PyTorch's checkpoint is, in what surrounds compiled code
def call_recomputed(
    modules: Sequence[nn.Module],
    forward: Callable[..., Any],
    arguments: Arguments,
    observation: Observation,
    recomputing: Recomputing,
) -> Any:
    """Call ``forward`` and save its inputs only; the backward calls it again."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    if observation.overwrites_inputs is None and any(map(is_lazy, tensors)):
        return forward(*arguments[0], **arguments[1])  # draws its weights in this call, as a second run would not
    watch = recomputing.watch
    watching = watch.call(flatten_arguments(arguments)[0]) if watch is not None else nullcontext()
    with watching, exact_only:
        return _Call(modules, forward, arguments, observation, recomputing).first(arguments)


def drop_empty_caches(layer: nn.Module, arguments: Arguments) -> Arguments:
    """Replace key-value caches in ``arguments`` by ``None``, as transformers does under its own checkpointing.

    A layer appends its keys and values to a cache (``use_cache=True`` is the default, in training too): a second run
    would append them twice, and the cache would keep alive what checkpointing frees.
    """
    if not any(_is_cache(leaf) for leaf in (*arguments[0], *arguments[1].values())):
        return arguments

    def drop(leaf: Any) -> Any:
        if not _is_cache(leaf):
            return leaf
        position = next((module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")), 0)
        if leaf.get_seq_length(position):
            raise RuntimeError(
                f"layer {type(layer).__name__} reads a filled key-value cache and cannot be recomputed. "
                "Choose other layers to checkpoint, or train without past_key_values."
            )
        return None

    return tree_map(drop, arguments, is_leaf=_is_cache)  # type: ignore[no-any-return]


def _is_cache(value: Any) -> bool:
    return hasattr(type(value), "get_seq_length") and hasattr(type(value), "update")
