"""Run a strategy's step inside contexts: later than any hook before it and earlier than any hook after it.

Dispatch modes and saved-tensor hooks are stacks: what is entered in one callback hook and left in another would nest
with those of other callbacks by the order of the list. Entered and left around the call of
``strategy.training_step`` itself, they nest as :class:`Depth` says, and the backward of automatic optimization is
outside.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_vram.core.surgery.shadow import pass_on


class Depth(IntEnum):
    """Who is entered first: what autograd keeps is dropped, else made smaller, else moved away."""

    OFFLOAD = 0
    COMPRESSION = 1
    RECOMPUTATION = 2
    OBSERVATION = 3


class _SurroundedStep:
    """Stands in for one method of a strategy as long as anybody enters a context around it."""

    def __init__(self, strategy: Strategy, name: str) -> None:
        self._strategy = strategy
        self._name = name
        self._inner = getattr(strategy, name)
        self._contexts: list[AroundStep] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        contexts = tuple(self._contexts)  # one may be removed inside
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context.around(*args, **kwargs))
            result = self._inner(*args, **kwargs)
            for context in reversed(contexts):
                if context.look is not None:
                    context.look(result)
        return result

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        """In a copy of the strategy, such as a worker process gets of the trainer, there are none."""
        return pass_on, (self._inner,)

    def add(self, context: "AroundStep") -> None:
        self._contexts.append(context)
        self._contexts.sort(key=lambda context: context.depth)

    def remove(self, context: "AroundStep") -> None:
        if context in self._contexts:
            self._contexts.remove(context)
        # One that somebody else's stand-in was put over stays and does nothing.
        if not self._contexts and vars(self._strategy).get(self._name) is self:
            delattr(self._strategy, self._name)


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
        if not isinstance(step, _SurroundedStep):
            step = _SurroundedStep(strategy, name)
            setattr(strategy, name, step)
        step.add(self)
        self._step = step

    def remove(self) -> None:
        """Take it away. Calling it again does nothing."""
        self._step.remove(self)
