"""The two runs of one call of a layer, and what has to be the same in both."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, set_checkpoint_early_stop

from lightning_vram.core.hooks.save_watch import SaveWatch
from lightning_vram.core.hooks.stepping_aside import InnermostHooks, stepping_aside
from lightning_vram.core.hooks.unfinished_saves import whole_last_operator
from lightning_vram.techniques.activation_checkpointing.determinism import (
    OperatorTrace,
    OutputSamples,
    RecomputationError,
)
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_checkpointing.selective import KeptOutputs

DeterminismCheck = Literal["outputs", "operators", "none"]
_DIFFERENCES = ("different metadata", "different number of tensors", "more tensors")  # in torch's words


@dataclass(frozen=True)
class CallWatch:
    """Whoever wants to know what a layer does.

    Args:
        call: Gets the arguments of a call; returns a context for all of it, from before anything is saved for it.
        inside: Returns a context for the first run of the layer's forward.
        on_recomputation: Called before the second run.
    """

    call: Callable[[Sequence[Any]], AbstractContextManager[None]]
    inside: Callable[[], AbstractContextManager[None]]
    on_recomputation: Callable[[], None]


@dataclass(frozen=True)
class Recomputing:
    """How a layer is recomputed.

    Args:
        name: Of the layer, for messages.
        save: Results of operators that the second run takes from the first; ``None``: it gets the inputs only.
        determinism_check: ``"outputs"`` compares what the layer returns, and what kept operators get, in the second run
            of its first call; ``"operators"`` compares all operators of each call; ``"none"`` nothing, not even shapes.
        watch: Is told what the layer does.
    """

    name: str
    save: SavePolicy | None = None
    determinism_check: DeterminismCheck = "outputs"
    watch: CallWatch | None = None


class LayerRuns:
    """The runs of one call: sees to it that the second is what the first was, or that the user gets to know."""

    def __init__(self, modules: Sequence[nn.Module], recomputing: Recomputing, checked: set[SavePolicy | None]) -> None:
        """Prepare them.

        Args:
            modules: That run.
            recomputing: How.
            checked: With what kept the layer was called before; gets what is kept now.
        """
        check = recomputing.determinism_check
        is_first, has_new_policy = not checked, recomputing.save not in checked
        checked.add(recomputing.save)
        self._name = recomputing.name
        self._watch = recomputing.watch
        self._compares_outputs = is_first and check == "outputs"
        self._samples: OutputSamples | None = None
        self._trace: OperatorTrace | None = None
        if check == "operators":
            self._trace = OperatorTrace(buffer for module in modules for buffer in module.buffers())
        self._outputs: KeptOutputs | None = None
        if recomputing.save is not None:
            self._outputs = KeptOutputs(recomputing.save, compares_inputs=has_new_policy and check == "outputs")

    def without_early_stop(self) -> AbstractContextManager[None]:
        """For a call whose second run is compared: it has to get to the end."""
        is_enabled = False
        is_compared = self._compares_outputs or self._trace is not None
        return set_checkpoint_early_stop(is_enabled) if is_compared else nullcontext()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Call the forward for the first time inside; then :meth:`note` what it returned."""
        with ExitStack() as stack:
            stack.enter_context(stepping_aside(InnermostHooks()))  # the checkpoint's
            on_save = self._outputs.count_save if self._outputs is not None else _ignore
            hooks = SaveWatch(on_save, self._explain).hooks()
            stack.enter_context(hooks)
            stack.enter_context(stepping_aside(hooks))
            if self._watch is not None:
                stack.enter_context(self._watch.inside())
            if self._outputs is not None:
                stack.enter_context(self._outputs.recording())
            if self._trace is not None:
                stack.enter_context(self._trace)
            yield

    def note(self, output: Any) -> None:
        """Note what the first run returned, if that is compared."""
        if self._compares_outputs:
            self._samples = OutputSamples(output)

    @contextmanager
    def second(self) -> Iterator[None]:
        """Call it again inside; then :meth:`check` what it returned.

        Raises:
            RecomputationError: If it does something else.
        """
        if self._watch is not None:
            self._watch.on_recomputation()
        try:
            with stepping_aside(InnermostHooks()), ExitStack() as stack:
                hooks = whole_last_operator()
                stack.enter_context(hooks)
                stack.enter_context(stepping_aside(hooks))
                if self._outputs is not None:
                    stack.enter_context(self._outputs.replaying())
                if self._trace is not None:
                    stack.enter_context(self._trace.comparing())
                yield
        except RecomputationError as error:
            raise self._error(f"{error}.", is_named=True) from None

    def check(self, output: Any) -> None:
        """Raise ``RecomputationError`` if the second run returned other values than the first."""
        if self._samples is not None and self._samples.differ_from(output):
            raise self._error("it returned other values than in its first run.")

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
