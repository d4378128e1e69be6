"""Run a strategy's step inside contexts."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum
from functools import partial
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_vram.core.surgery.shadow import Shadow


class Depth(IntEnum):
    """Which context is entered first: what autograd saves is dropped, else compressed, else offloaded."""

    OFFLOAD = 0
    COMPRESSION = 1
    RECOMPUTATION = 2
    OBSERVATION = 3


class _SurroundedStep(Shadow):
    """Replaces one method of a strategy as long as there are contexts around it."""

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
    """A context around each call of one step of a strategy, such as ``training_step``, until :meth:`remove`.

    Dispatch modes and saved-tensor hooks are stacks: entered in one callback hook and left in another, they would nest
    with those of other callbacks by the order of the list. Around the call of the step itself, after all hooks before
    it and before all hooks after it, they nest by :class:`Depth`. The backward of automatic optimization is outside.
    """

    def __init__(
        self,
        strategy: Strategy,
        name: str,
        depth: Depth,
        around: Callable[..., AbstractContextManager[object]],  # gets the arguments of the call
        look: Callable[[Any], None] | None = None,  # gets what the call returned, inside the context
    ) -> None:
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
        """Leave it out from now on. Calling it again does nothing."""
        contexts = self._step.contexts
        if self in contexts:
            contexts.remove(self)
        if not contexts:
            self._step.remove()
