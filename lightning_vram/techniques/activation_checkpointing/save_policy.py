"""Which operators' results a checkpointed layer saves, and how recomputation takes them from the first run.

PyTorch's ``create_selective_checkpoint_contexts`` keeps results where no saved-tensor hook sees them, so that they can
be neither offloaded nor compressed; it keeps results that recomputation never reaches, refuses layers that overwrite
one, and redraws different dropout masks after an operator with random numbers. Here each of these works.
"""

from collections.abc import Callable, Iterable, Sequence
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
    resolved: frozenset[Any] = field(init=False, repr=False, compare=False)
    """Operators of the policy, as in ``torch.ops``."""

    def __post_init__(self) -> None:
        check_positive_int("SavePolicy(every_n)", self.every_n)
        if not isinstance(self.operators, str):
            names: object = self.operators
            if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
                raise TypeError(
                    "SavePolicy(operators) must be 'matmuls', 'attention' or a list of operator names, "
                    f"got {names!r} of type {type(names).__name__}."
                )
            object.__setattr__(self, "operators", tuple(names))
        if self.numbers is not None:
            object.__setattr__(self, "numbers", frozenset(self.numbers))
        object.__setattr__(self, "resolved", _resolve(self.operators))

    def __reduce__(self) -> Any:
        return SavePolicy, (self.operators, self.every_n, self.numbers)  # operators do not pickle, their names do

    def keeps(self, number: int) -> bool:
        """Whether to save the result with this index, counted from 0 in each call of a layer."""
        return number % self.every_n == 0 and (self.numbers is None or number in self.numbers)


def parse_save(save: object, argument: str) -> SavePolicy | None:
    """Return the policy that a user gave, ``None`` for ``"inputs"``; ``argument`` is the name for messages."""
    if save == "inputs":
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
        members: Iterable[Any] = (overload for name in _FAMILIES[operators] for overload in find_overloads(name))
    elif operators:
        members = resolve_operators(operators)
    else:
        raise ValueError("the list of operators is empty. Use 'inputs' to save inputs only.")
    return frozenset(filter(_gives_new_memory, members))


def _gives_new_memory(operator: Any) -> bool:
    if not isinstance(operator, OpOverload):
        return True
    schema = schema_of(operator)
    return not schema.is_mutable and not any(result.alias_info for result in schema.returns)


class _Result:
    """The result of one call of an operator; one that is not kept has to be computed again."""

    def __init__(self, function: Any, signature: "Signature", num_saves: int) -> None:
        self.function, self.signature = function, signature
        self._num_saves = num_saves  # tensors that autograd had saved in the layer before it ran
        self._leaves: list[Any] | None = None  # in the first run; ``None`` once it was overwritten
        self._watched: list[tuple[Tensor, int]] = []  # tensors on its memory, with their versions
        self._kept: list[Any] | None = None  # from the end of the first run on: a backward inside of it finds nothing
        self._rebuild: Rebuild = list
        self._random_states: list[tuple[Callable[[Any], Any], Any]] = []

    def keep(self, output: Any, random_states: list[tuple[Callable[[Any], Any], Any]]) -> set[int]:
        """Keep ``output``, and where generators stood after it; returns the addresses of its memory."""
        leaves, self._rebuild = flatten_output(output)
        self._leaves = [alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._random_states = random_states
        self._watched += [(leaf, version_of(leaf)) for leaf in self._leaves if isinstance(leaf, Tensor)]
        return {storage_address(leaf) for leaf in leaves if isinstance(leaf, Tensor)} - {0}

    def watch(self, tensor: Tensor) -> None:
        """Give it up as soon as ``tensor``, which shares its memory, is written to."""
        self._watched.append((alias(tensor), version_of(tensor)))

    def give_up(self) -> None:
        """Do not keep it: it was overwritten, and is made and overwritten again in the second run."""
        self._leaves, self._watched = None, []

    def settle(self, num_saves: int) -> bool:
        """Save it, unless the layer wrote to it or saved nothing after it: the second run ends before then."""
        (leaves, self._leaves), (watched, self._watched) = (self._leaves, None), (self._watched, [])
        is_intact = all(version_of(tensor) == version for tensor, version in watched)
        if leaves is None or self._num_saves == num_saves or not is_intact:
            return False
        others = [tensor for tensor, _ in watched]
        self._kept = [SavedOutput(leaf, others) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return True

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
        if not retains_graph():  # if it is wanted once more, it is computed again
            self._kept, self._random_states = None, []
        return (self._rebuild(leaves),)


aten = torch.ops.aten

# Their results share memory with their argument and count versions on their own: nobody is to write to both.
_UNSAFE_VIEWS = frozenset(
    [UNSAFE_VIEW, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default]
)


class _Mode(SelectiveCheckpointMode):
    def __init__(self, operators: frozenset[Any]) -> None:
        self._operators = operators
        # Not counted are those of a backward inside of the layer, which may recompute the layer itself.
        self._backward = current_graph_task_id()

    def _is_chosen(self, func: Any) -> bool:
        return func in self._operators and current_graph_task_id() == self._backward


class Recording(_Mode):
    """Runs the first forward of a call, and keeps the results that ``choice`` names.

    ``saves``: one per tensor that autograd has saved so far: later results are not needed.
    """

    def __init__(self, choice: SavePolicy, saves: Sequence[object]) -> None:
        super().__init__(choice.resolved)
        self._choice, self._saves = choice, saves
        self.results: list[_Result] = []
        self._by_address: dict[int, list[_Result]] = {}
        self.is_complete = False  # a backward inside of the layer recomputes it before its forward has ended

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if self._is_chosen(func):
            return self._keep(func, types, args, kwargs or {})
        output = self.run(func, types, args, kwargs)
        if self._by_address:
            self._follow(func, args, kwargs, output)
        return output

    def settle(self) -> int:
        """Save what recomputation needs, after the forward, outside of the checkpoint; return how many."""
        self.is_complete = True
        self._by_address.clear()
        return sum(result.settle(len(self._saves)) for result in self.results)

    def _keep(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = len(self.results)
        result = _Result(func, sign(args, kwargs), len(self._saves))
        self.results.append(result)
        if not self._choice.keeps(number):
            return self.run(func, types, args, kwargs)
        sources = find_sources(func, args, kwargs)
        before = [read() for read, _ in sources]
        output = self.run(func, types, args, kwargs)
        after = [read() for read, _ in sources]
        states = [(w, now) for (_, w), was, now in zip(sources, before, after, strict=True) if differs(was, now)]
        for address in result.keep(output, states):
            self._by_address.setdefault(address, []).append(result)
        return output

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, output: Any) -> None:
        """Give up what is overwritten: kernels under a dispatch mode, collectives and ``.data`` count no version."""
        if written_arguments(func):
            for tensor in iterate_written(func, args, kwargs):
                for result in self._by_address.get(storage_address(tensor), ()):
                    result.give_up()
        elif func in _UNSAFE_VIEWS:
            for tensor in output if isinstance(output, tuple | list) else (output,):
                for result in self._by_address.get(storage_address(tensor), ()):
                    result.watch(tensor)


class Replaying(_Mode):
    """Runs the forward once more, with what was kept of the first."""

    def __init__(self, first: Recording) -> None:
        super().__init__(first._operators)
        self._first, self._number = first, 0

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if self._first.is_complete and self._is_chosen(func):
            output = self._next(func, sign(args, kwargs or {})).give()
            if output is not None:
                return output[0]
        return self.run(func, types, args, kwargs)

    def _next(self, func: Any, signature: "Signature") -> _Result:
        number, self._number = self._number, self._number + 1
        if number >= len(self._first.results):
            raise RecomputationError(f"it ran {func} once more than the forward")
        result = self._first.results[number]
        if (result.function, result.signature) != (func, signature):
            first = f"{result.function}{describe(result.signature)}"
            raise RecomputationError(f"it ran {func}{describe(signature)} where the forward ran {first}")
        return result


Signature = tuple[tuple[Any, Any, int], ...]


def sign(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """Return shapes, types and parameters among arguments: one operator is not to be taken for another."""
    leaves = flatten_arguments((args, kwargs))[0]
    bases = ((leaf, base_of(leaf) if is_view(leaf) else leaf) for leaf in leaves if isinstance(leaf, Tensor))
    return tuple((leaf.shape, leaf.dtype, id(base) if type(base) in PARAMETER_CLASSES else 0) for leaf, base in bases)


def describe(signature: Signature) -> str:
    """Write a signature for a message."""
    tensors = (str(dtype).removeprefix("torch.") + str(list(shape)) for shape, dtype, _ in signature)
    return f"({', '.join(tensors)})"
