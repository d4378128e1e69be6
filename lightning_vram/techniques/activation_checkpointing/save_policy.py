"""Which operators' results a checkpointed layer saves, and how recomputation takes them from the first run.

PyTorch's ``create_selective_checkpoint_contexts`` keeps results where no saved-tensor hook sees them, so that they can
be neither offloaded nor compressed; it keeps results that recomputation never reaches, refuses layers that overwrite
one, and redraws different dropout masks after an operator with random numbers. Here each of these works.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.hooks import SavedOutput, SelectiveCheckpointMode
from lightning_vram.core.operators import (
    ATTENTION,
    MATMULS,
    find_overloads,
    iterate_written,
    resolve_operators,
    written_arguments,
)
from lightning_vram.core.random_state import differs, find_sources
from lightning_vram.core.recomputed_saves import RecomputationError
from lightning_vram.core.tensors.properties import PARAMETER_CLASSES, Rebuild, alias, flatten_arguments, flatten_output
from lightning_vram.memory.storages import storage_address, version_of
from lightning_vram.private_names.dispatcher import UNSAFE_VIEW, OpOverload, schema_of
from lightning_vram.private_names.torch import base_of, current_graph_task_id, is_view, retains_graph

_FAMILIES = {"matmuls": MATMULS | ATTENTION, "attention": ATTENTION}
INPUTS = "inputs"


@dataclass(frozen=True)
class SavePolicy:
    """Save the results of some operators in checkpointed layers, in addition to the layers' inputs.

    Args:
        operators: ``"matmuls"``: matrix products, convolutions, recurrent kernels and fused attention: nearly all of
            the time, about half of the memory. ``"attention"``: fused attention only. Or a list of operator names in
            ``torch.ops``, with or without overload: ``["aten.mm", "aten.addmm.default", "mylib.flash"]``.
        every_n: Save the first of their results in a layer and every n-th after it.
        numbers: Save only results with these indices, counted from 0 in each call of a layer. Set by the plan of a
            ``budget``. ``None``: all.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an operator or family is unknown, no operator is named, or ``every_n`` is smaller than 1.

    Example:
        >>> from lightning_vram import ActivationCheckpointing, SavePolicy
        >>> callback = ActivationCheckpointing(save=SavePolicy(["aten.mm", "aten.addmm"], every_n=2))
    """

    operators: str | Sequence[str]
    every_n: int = 1
    numbers: frozenset[int] | None = None
    _operators: frozenset[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive_int("SavePolicy(every_n)", self.every_n)
        if not isinstance(self.operators, str):
            _check_names(self.operators)
            object.__setattr__(self, "operators", tuple(self.operators))
        if self.numbers is not None:
            object.__setattr__(self, "numbers", frozenset(self.numbers))
        object.__setattr__(self, "_operators", _resolve(self.operators))

    def __reduce__(self) -> Any:
        return SavePolicy, (self.operators, self.every_n, self.numbers)  # operators do not pickle, their names do

    def concerns(self, operator: Any) -> bool:
        """Whether ``operator`` belongs to the policy."""
        return operator in self._operators

    def keeps(self, number: int) -> bool:
        """Whether to save the result with this index, counted from 0 in each call of a layer."""
        return number % self.every_n == 0 and (self.numbers is None or number in self.numbers)

    @property
    def resolved(self) -> frozenset[Any]:
        """Operators of the policy, as in ``torch.ops``."""
        return self._operators


def parse_save(save: object, argument: str) -> SavePolicy | None:
    """Return the policy that a user gave, ``None`` for ``"inputs"``; ``argument`` is the name for messages."""
    if save == INPUTS:
        return None
    if isinstance(save, SavePolicy):
        return save
    try:
        return SavePolicy(save)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {error}") from None


def _resolve(operators: str | Sequence[str]) -> frozenset[Any]:
    if isinstance(operators, str):
        if operators not in _FAMILIES:
            raise ValueError(
                f"{operators!r} is not a family of operators. Use 'inputs' (none), 'matmuls' or 'attention', or a list "
                "of operators, such as ['aten.mm']."
            )
        members = (overload for name in _FAMILIES[operators] for overload in find_overloads(name))
        return frozenset(filter(_gives_new_memory, members))
    if not operators:
        raise ValueError("the list of operators is empty. Use 'inputs' to save inputs only.")
    return frozenset(filter(_gives_new_memory, resolve_operators(operators)))


def _check_names(operators: object) -> None:
    if not isinstance(operators, Sequence) or not all(isinstance(name, str) for name in operators):
        raise TypeError(
            "SavePolicy(operators) must be 'matmuls', 'attention' or a list of operator names, "
            f"got {operators!r} of type {type(operators).__name__}."
        )


def _gives_new_memory(operator: Any) -> bool:
    if not isinstance(operator, OpOverload):
        return True
    schema = schema_of(operator)
    return not schema.is_mutable and not any(result.alias_info for result in schema.returns)


class SavedResult:
    """The result of one call of an operator; one that is not kept has to be computed again."""

    __slots__ = (
        *("_kept", "_leaves", "_num_saves", "_random_states", "_rebuild", "_watched"),
        *("addresses", "function", "signature"),
    )

    def __init__(self, function: Any, signature: Any, num_saves: int) -> None:
        self.function = function
        self.signature = signature
        self.addresses: set[int] = set()
        self._num_saves = num_saves  # tensors that autograd had saved in the layer before it ran
        self._leaves: list[Any] | None = None
        self._watched: list[tuple[Tensor, int]] = []  # other tensors on its memory, with their versions
        self._kept: list[Any] | None = None  # from the end of the first run on: a backward inside of it finds nothing
        self._rebuild: Rebuild = list
        self._random_states: list[tuple[Callable[[Any], Any], Any]] = []

    def keep(self, output: Any, random_states: list[tuple[Callable[[Any], Any], Any]]) -> None:
        """Keep ``output``, and where generators stood after it."""
        leaves, self._rebuild = flatten_output(output)
        self._leaves = [alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._random_states = random_states
        self.addresses = {storage_address(leaf) for leaf in leaves if isinstance(leaf, Tensor)} - {0}
        self._watched += [(leaf, version_of(leaf)) for leaf in self._leaves if isinstance(leaf, Tensor)]

    def watch(self, tensor: Tensor) -> None:
        """Give it up as soon as ``tensor``, which shares its memory, is written to."""
        self._watched.append((alias(tensor), version_of(tensor)))

    def give_up(self) -> None:
        """Do not keep it: it was overwritten, and is made and overwritten again in the second run."""
        self._leaves = None
        self._watched = []

    def settle(self, num_saves: int) -> bool:
        """Save it, unless the layer wrote to it or saved nothing after it: the second run ends before then."""
        leaves, self._leaves = self._leaves, None
        watched, self._watched = self._watched, []
        is_intact = all(version_of(tensor) == version for tensor, version in watched)
        if leaves is None or self._num_saves == num_saves or not is_intact:
            return False
        others = [tensor for tensor, _ in watched]
        self._kept = [SavedOutput(leaf, others) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return True

    def forget(self) -> None:
        """Do not keep it any longer: if it is wanted once more, it has to be computed again."""
        self._kept, self._random_states = None, []

    def give(self) -> tuple[Any] | None:
        """Return what the operator returned, in a tuple; ``None`` if it has to run again."""
        if self._kept is None:
            return None
        leaves = []
        for kept in self._kept:
            leaf = kept.give() if isinstance(kept, SavedOutput) else kept
            if leaf is None and isinstance(kept, SavedOutput):
                return None  # overwritten after the layer: as if it had not been kept
            leaves.append(alias(leaf) if isinstance(leaf, Tensor) else leaf)
        for write, state in self._random_states:
            write(state)
        return (self._rebuild(leaves),)


aten = torch.ops.aten

# Their results share memory with their argument and count versions on their own: nobody is to write to both.
_UNSAFE_VIEWS = frozenset(
    [UNSAFE_VIEW, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default]
)


class SavedOutputs:
    """The results kept of one call of a layer."""

    def __init__(self, choice: SavePolicy, saves: Sequence[object]) -> None:
        self.choice = choice
        self.saves = saves  # one per tensor that autograd has saved so far: later results are not needed
        self.results: list[SavedResult] = []
        self.by_address: dict[int, list[SavedResult]] = {}
        self.is_complete = False  # a backward inside of the layer recomputes it before its forward has ended

    def settle(self) -> int:
        """Save what recomputation needs, after the first forward, outside of the checkpoint; return how many."""
        self.is_complete = True
        self.by_address.clear()
        return sum(result.settle(len(self.saves)) for result in self.results)


class _Mode(SelectiveCheckpointMode):
    def __init__(self, kept: SavedOutputs) -> None:
        self._kept = kept
        self._operators = kept.choice.resolved
        # Not counted are those of a backward inside of the layer, which may recompute the layer itself.
        self._backward = current_graph_task_id()


class Recording(_Mode):
    """Runs the first forward: keeps what is chosen."""

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if func in self._operators and current_graph_task_id() == self._backward:
            return self._keep(func, types, args, kwargs or {})
        output = self.run(func, types, args, kwargs)
        if self._kept.by_address:
            self._follow(func, args, kwargs, output)
        return output

    def _keep(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = self._kept
        number = len(kept.results)
        leaves = flatten_arguments((args, kwargs))[0]
        result = SavedResult(func, sign(leaves), len(kept.saves))
        kept.results.append(result)
        if not kept.choice.keeps(number):
            return self.run(func, types, args, kwargs)
        sources = find_sources(func, args, kwargs)
        before = [read() for read, _ in sources]
        output = self.run(func, types, args, kwargs)
        after = [read() for read, _ in sources]
        result.keep(
            output,
            [(w, now) for (_, w), was, now in zip(sources, before, after, strict=True) if differs(was, now)],
        )
        for address in result.addresses:
            kept.by_address.setdefault(address, []).append(result)
        return output

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> None:
        """Give up what is overwritten: kernels under a dispatch mode, collectives and ``.data`` count no version."""
        by_address = self._kept.by_address
        if written_arguments(func):
            for tensor in iterate_written(func, args, kwargs):
                for result in by_address.get(storage_address(tensor), ()):
                    result.give_up()
        elif func in _UNSAFE_VIEWS:
            for tensor in output if isinstance(output, tuple | list) else (output,):
                for result in by_address.get(storage_address(tensor), ()):
                    result.watch(tensor)


class Replaying(_Mode):
    """Runs the forward once more, with what was kept."""

    def __init__(self, kept: SavedOutputs) -> None:
        super().__init__(kept)
        self._number = 0

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if func in self._operators and current_graph_task_id() == self._backward:
            leaves = flatten_arguments((args, kwargs or {}))[0]
            result = self._next(func, leaves)
            output = result.give() if result is not None else None
            if result is not None and output is not None:
                if not retains_graph():
                    result.forget()
                return output[0]
        return self.run(func, types, args, kwargs)

    def _next(self, func: Any, leaves: list[Any]) -> SavedResult | None:
        if not self._kept.is_complete:
            return None
        number, self._number = self._number, self._number + 1
        results = self._kept.results
        if number >= len(results):
            raise RecomputationError(f"it ran {func} once more than the forward")
        result = results[number]
        if result.function is not func or result.signature != sign(leaves):
            first = f"{result.function}{describe(result.signature)}"
            raise RecomputationError(f"it ran {func}{describe(sign(leaves))} where the forward ran {first}")
        return result


Signature = tuple[tuple[Any, Any, int], ...]


def sign(leaves: list[Any]) -> Signature:
    """Return shapes, types and parameters among arguments: one operator is not to be taken for another."""
    return tuple((leaf.shape, leaf.dtype, _parameter_of(leaf)) for leaf in leaves if isinstance(leaf, Tensor))


def describe(signature: Signature) -> str:
    """Write a signature for a message."""
    tensors = (str(dtype).removeprefix("torch.") + str(list(shape)) for shape, dtype, _ in signature)
    return f"({', '.join(tensors)})"


def _parameter_of(tensor: Tensor) -> int:
    base = base_of(tensor) if is_view(tensor) else tensor
    return id(base) if type(base) in PARAMETER_CLASSES else 0
