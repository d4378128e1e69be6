"""Run a strategy's step inside contexts: later than any hook before it and earlier than any hook after it.

Dispatch modes and saved-tensor hooks are stacks: what is entered in one callback hook and left in another would nest
with those of other callbacks by the order of the list. Entered and left around the call of
``strategy.training_step`` itself, they nest as :class:`Depth` says, and the backward of automatic optimization is
outside.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum
from functools import partial
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_vram.core.surgery.shadow import Shadow


class Depth(IntEnum):
    """Who is entered first: what autograd keeps is dropped, else made smaller, else moved away."""

    OFFLOAD = 0
    COMPRESSION = 1
    RECOMPUTATION = 2
    OBSERVATION = 3


class _SurroundedStep(Shadow):
    """Stands in for one method of a strategy as long as anybody enters a context around it."""

    def __init__(self, strategy: Strategy, name: str) -> None:
        self.contexts: list[AroundStep] = []
        super().__init__(strategy, name, partial(partial, self._run))

    def _run(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        contexts = tuple(self.contexts)  # one may be removed inside
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context.around(*args, **kwargs))
            result = inner(*args, **kwargs)
            for context in reversed(contexts):
                if context.look is not None:
                    context.look(result)
        return result


class AroundStep:
    """A context around each call of one step of a strategy, such as ``training_step``, until :meth:`remove`."""

    def __init__(
        self,
        strategy: Strategy,
        name: str,
        depth: Depth,
        around: Callable[..., AbstractContextManager[object]],
        look: Callable[[Any], None] | None = None,
    ) -> None:
        """Put it in place.

        Args:
            strategy: Of the trainer that is about to run.
            name: Of the method.
            depth: Among the contexts around one step.
            around: Makes the context for one call; gets the arguments of the call.
            look: Is shown what a call returned, inside the context.
        """
        self.depth = depth
        self.around = around
        self.look = look
        step = vars(strategy).get(name)
        if not isinstance(step, _SurroundedStep) or not step.contexts:  # one without only passes calls on
            step = _SurroundedStep(strategy, name)
        step.contexts.append(self)
        step.contexts.sort(key=lambda context: context.depth)
        self._step = step

    def remove(self) -> None:
        """Take it away. Calling it again does nothing."""
        contexts = self._step.contexts
        if self in contexts:
            contexts.remove(self)
        if not contexts:
            self._step.remove()
