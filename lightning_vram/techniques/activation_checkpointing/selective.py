"""Selective checkpointing: recomputation takes the results of chosen operators from the first run.

PyTorch's ``create_selective_checkpoint_contexts`` keeps results where no saved-tensor hook sees them, so that they can
be neither offloaded nor compressed; it keeps results that recomputation never reaches, refuses layers that overwrite
one, and redraws different dropout masks after an operator with random numbers. Here each of these works.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.hooks.mode import QuietMode
from lightning_vram.core.hooks.moment import SelectiveCheckpointMode
from lightning_vram.core.hooks.saved_samples import RecomputationError
from lightning_vram.core.operators.families import iterate_written, written_arguments
from lightning_vram.core.random_state.sources import differs, find_sources
from lightning_vram.core.tensors.nests import flatten_arguments
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.private_names.torch.autograd import current_graph_task_id, retains_graph
from lightning_vram.private_names.torch.dispatch import TorchDispatchMode
from lightning_vram.private_names.torch.operator_calls import call_operator
from lightning_vram.private_names.torch.operators import UNSAFE_VIEW
from lightning_vram.private_names.torch.tensors import base_of, is_view
from lightning_vram.techniques.activation_checkpointing.kept_result import KeptResult
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy

aten = torch.ops.aten

# Their results share memory with their argument and count versions on their own: nobody is to write to both.
_UNSAFE_VIEWS = frozenset(
    [UNSAFE_VIEW, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default]
)


class KeptOutputs:
    """The results kept of one call of a layer."""

    def __init__(self, choice: SavePolicy, saves: Sequence[object]) -> None:
        self.choice = choice
        self.saves = saves  # one per tensor that autograd has saved so far: later results are not needed
        self.results: list[KeptResult] = []
        self.by_address: dict[int, list[KeptResult]] = {}
        self.is_complete = False  # a backward inside of the layer recomputes it before its forward has ended

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the first forward inside."""
        with _Recording(self):
            yield
        self.by_address.clear()

    def settle(self) -> int:
        """Save what recomputation needs, after the first forward, outside of the checkpoint; return how many."""
        self.is_complete = True
        return sum(result.settle(len(self.saves)) for result in self.results)

    def replaying(self) -> TorchDispatchMode:
        """Return a context for one more forward."""
        return _Replaying(self)


class _Mode(SelectiveCheckpointMode, QuietMode):
    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()
        self._kept = kept
        self._backward = current_graph_task_id()

    def _concerns(self, func: Any) -> bool:
        """Whether ``func`` is counted: not in a backward inside of the layer, which may recompute the layer itself."""
        return self._kept.choice.concerns(func) and current_graph_task_id() == self._backward


class _Recording(_Mode):
    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._concerns(func):
            return self._keep(func, args, kwargs or {})
        output = call_operator(func, args, kwargs)
        if self._kept.by_address:
            self._follow(func, args, kwargs, output)
        return output

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = self._kept
        number = len(kept.results)
        leaves = flatten_arguments((args, kwargs))[0]
        result = KeptResult(func, sign(leaves), len(kept.saves))
        kept.results.append(result)
        if not kept.choice.keeps(number):
            return call_operator(func, args, kwargs)
        sources = find_sources(func, args, kwargs)
        before = [read() for read, _ in sources]
        output = call_operator(func, args, kwargs)
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


class _Replaying(_Mode):
    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__(kept)
        self._number = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._concerns(func):
            leaves = flatten_arguments((args, kwargs or {}))[0]
            result = self._next(func, leaves)
            output = result.give() if result is not None else None
            if result is not None and output is not None:
                if not retains_graph():
                    result.forget()
                return output[0]
        return call_operator(func, args, kwargs)

    def _next(self, func: Any, leaves: list[Any]) -> KeptResult | None:
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
