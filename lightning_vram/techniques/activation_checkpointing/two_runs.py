"""The two runs of one call of a layer, and what has to be the same in both."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import ref

from torch import nn

from lightning_vram.core.hooks.moment import is_in_backward
from lightning_vram.core.hooks.recomputed_saves import Place, RecomputedSaves, SecondRun
from lightning_vram.core.hooks.saved_samples import RecomputationError, SavedSamples, differed, is_due
from lightning_vram.core.hooks.stepping_aside import OwnHooks, stepping_aside
from lightning_vram.private_names.torch.autograd import may_stop_early
from lightning_vram.techniques.activation_checkpointing.determinism import OperatorTrace
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_checkpointing.selective import KeptOutputs

Counts = Counter[tuple[SavePolicy | None, bool]]
"""How often a layer was called, by what is kept, and whether it was in a backward."""
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


class LayerRuns:
    """The two runs of one call; an error says where the second differs from the first."""

    def __init__(self, modules: Sequence[nn.Module], recomputing: Recomputing, counts: Counts) -> None:
        check = recomputing.determinism_check
        kind = recomputing.save, is_in_backward()  # where a checkpoint around it recomputes: counted apart
        counts[kind] += 1
        self._name = recomputing.name
        self._watch = recomputing.watch
        self._samples: SavedSamples | None = None
        if check == "outputs" and is_due(counts[kind]):
            self._samples = SavedSamples(buffer for module in modules for buffer in module.buffers())
        self._trace: OperatorTrace | None = None
        if check == "operators":
            self._trace = OperatorTrace(buffer for module in modules for buffer in module.buffers())
        self._places: list[ref[Place]] = []
        self._outputs: KeptOutputs | None = None
        if recomputing.save is not None:
            self._outputs = KeptOutputs(recomputing.save, self._places)
        self._compares_kinds = check != "none"

    def saves(self, run_again: Callable[[SecondRun], None]) -> RecomputedSaves:
        """Return what is saved in the call, which ``run_again`` runs a second time."""
        return RecomputedSaves(
            run_again,
            self._places,
            self._error,
            compares_kinds=self._compares_kinds,
            stops_early=self._trace is None and may_stop_early(),
            samples=self._samples,
        )

    def first(self, saves: RecomputedSaves) -> AbstractContextManager[None]:
        """Return the context for the first call of the forward."""
        watching = self._watch.inside() if self._watch is not None else None
        recording = self._outputs.recording() if self._outputs is not None else None
        return _inside(saves, watching, recording, self._trace)

    @contextmanager
    def second(self, run: SecondRun) -> Iterator[None]:
        """Run the forward again inside; raises ``RecomputationError`` if it differs."""
        if self._watch is not None:
            self._watch.on_recomputation()
        replaying = self._outputs.replaying() if self._outputs is not None else None
        comparing = self._trace.comparing() if self._trace is not None else None
        try:
            with _inside(run, replaying, comparing):
                yield
        except RecomputationError as error:
            raise self._error(f"{error}.", is_named=True) from None

    def settle(self) -> int:
        """Call after the first run, outside of the checkpoint; returns how many results are kept."""
        if self._samples is not None:
            self._samples.settle()
        return self._outputs.settle() if self._outputs is not None else 0

    def _error(self, reason: str, *, is_named: bool = False) -> RecomputationError:
        tip = "" if is_named else "determinism_check='operators' names the operator that differs. "
        way_out = (
            "Leave the layer out of checkpointing, or pass determinism_check='none' if the difference is intended."
        )
        return differed(self._name, reason, tip + way_out)


@contextmanager
def _inside(hooks: OwnHooks, *others: AbstractContextManager[Any] | None) -> Iterator[None]:
    """Enter hooks, then what else there is."""
    with hooks, stepping_aside(hooks), ExitStack() as stack:
        for other in filter(None, others):
            stack.enter_context(other)
        yield
