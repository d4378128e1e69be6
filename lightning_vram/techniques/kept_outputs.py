"""Selective checkpointing: the second run of a layer takes the results of chosen operators from the first.

PyTorch has this as ``create_selective_checkpoint_contexts`` and keeps the results in a list that no saved-tensor hook
sees, so that they can be neither offloaded nor compressed; it keeps results that the second run never reaches; it
refuses a layer that overwrites one; and operators that draw random numbers (attention with dropout) leave the
generator behind in the second run, so that the masks after them differ. Here each of these works.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from typing_extensions import override

from lightning_vram.techniques.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.techniques.save_policy import SavePolicy
from lightning_vram.techniques.saved_output import SavedOutput
from lightning_vram.techniques.versions import alias, version_of
from lightning_vram.techniques.watched_saves import SaveWatch


class RecomputationError(RuntimeError):
    """The second run of a layer is not what the first was."""


class KeptOutputs:
    """The results kept of one call of a layer.

    Args:
        choice: What to keep.
    """

    def __init__(self, choice: SavePolicy) -> None:
        self.choice = choice
        self.results: list[_Result] = []
        self.num_saves = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the first forward inside."""
        with SaveWatch(self._count).hooks(), _Recording(self):
            yield

    def settle(self) -> int:
        """Call after the first forward, outside of the checkpoint: saves what the second run will want.

        Returns:
            How many results are kept.
        """
        return sum(result.settle(self.num_saves) for result in self.results)

    def replaying(self) -> TorchDispatchMode:
        """Return a context for one more forward."""
        return _Replaying(self)

    def _count(self, tensor: Tensor) -> None:
        self.num_saves += 1


class _Result:
    """What one counted operator returned."""

    __slots__ = ("_kept", "_leaves", "_num_saves", "_random_states", "_structure", "_versions", "function")

    def __init__(self, function: Any, num_saves: int) -> None:
        self.function = function
        self._num_saves = num_saves
        self._leaves: list[Any] | None = None
        self._versions: list[int] = []
        self._kept: list[Any] | None = None  # from the end of the first run on: a backward inside of it finds nothing
        self._structure: TreeSpec | None = None
        self._random_states: list[tuple[torch.Generator, Tensor]] = []

    def keep(self, output: Any, random_states: list[tuple[torch.Generator, Tensor]]) -> None:
        leaves, self._structure = tree_flatten(output)
        self._leaves = [alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._versions = [version_of(leaf) for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._random_states = random_states

    def settle(self, num_saves: int) -> bool:
        """Save the result, unless the layer wrote to it or saved nothing after it: the second run ends before then."""
        leaves, self._leaves = self._leaves, None
        if leaves is None or self._num_saves == num_saves:
            return False
        if [version_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)] == self._versions:
            self._kept = [SavedOutput(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._kept is not None

    def give(self) -> tuple[Any] | None:
        """Return what the operator returned, in a tuple; ``None`` if it has to run again."""
        if self._kept is None or self._structure is None:
            return None
        leaves = []
        for kept in self._kept:
            leaf = kept.give() if isinstance(kept, SavedOutput) else kept
            if leaf is None:
                return None  # overwritten after the layer: as if it had not been kept
            leaves.append(alias(leaf) if isinstance(leaf, Tensor) else leaf)
        for generator, state in self._random_states:
            generator.set_state(state)
        return (tree_unflatten(leaves, self._structure),)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._backward = torch._C._current_graph_task_id()

    def _concerns(self, func: Any) -> bool:
        """Whether ``func`` is counted: not in a backward inside of the layer, which may recompute the layer itself."""
        return self._kept.choice.concerns(func) and torch._C._current_graph_task_id() == self._backward

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of the layer run compiled: they are recomputed as a whole."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # hidden below, without a wrapper around every call


class _Recording(_Mode):  # type: ignore[no-untyped-call]
    @override
    @hide_from_dynamo
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kept = self._kept
        if not self._concerns(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        number = len(kept.results)
        result = _Result(func, kept.num_saves)
        kept.results.append(result)
        if not kept.choice.keeps(number):
            return func(*args, **(kwargs or {}))
        generators = _generators_of(func, args, kwargs)
        before = [generator.get_state() for generator in generators]
        output = func(*args, **(kwargs or {}))
        after = [generator.get_state() for generator in generators]
        result.keep(
            output,
            [(g, now) for g, was, now in zip(generators, before, after, strict=True) if not torch.equal(was, now)],
        )
        return output


class _Replaying(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__(kept)
        self._number = 0

    @override
    @hide_from_dynamo
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kept = self._kept
        if self._concerns(func) and self._number < len(kept.results):
            number, self._number = self._number, self._number + 1
            result = kept.results[number]
            if result.function is not func:
                raise RecomputationError(
                    f"ran {func} where its first run had {result.function} (number {number} of the kept operators)"
                )
            output = result.give()
            if output is not None:
                return output[0]
        return func(*args, **(kwargs or {}))


def _generators_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[torch.Generator]:
    """Find the generators that an operator may draw from: those of its devices, if it may draw at all."""
    is_of_torch = getattr(func, "namespace", "") == "aten"
    if is_of_torch and torch.Tag.nondeterministic_seeded not in func.tags:
        return []
    devices = {leaf.device for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)}
    generators = [torch.default_generator]
    for device in devices:
        if device.type not in ("cpu", "meta"):
            generators.append(torch.get_device_module(device.type).default_generators[device.index])
    return generators
