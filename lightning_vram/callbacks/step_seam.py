"""Run a strategy's step inside a context: later than any hook before it and earlier than any hook after it.

Dispatch modes and saved-tensor hooks are stacks: what is entered in one callback hook and left in another would nest
with those of other callbacks by the order of the list. Entered and left around the call of
``strategy.training_step`` itself, they nest by construction, and the backward of automatic optimization is outside.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.strategies import Strategy


class StepSeam:
    """Stands in for one step of a strategy, such as ``training_step``, until :meth:`remove`."""

    def __init__(
        self,
        strategy: Strategy,
        name: str,
        around: Callable[[], AbstractContextManager[object]],
        look: Callable[[Any], None] | None = None,
    ) -> None:
        """Put it in place.

        Args:
            strategy: Of the trainer that is about to run.
            name: Of the method.
            around: Makes the context for one call.
            look: Is shown what a call returned, inside the context.
        """
        self._strategy = strategy
        self._name = name
        self._around: Callable[[], AbstractContextManager[object]] | None = around
        self._look = look
        self._inner = getattr(strategy, name)
        setattr(strategy, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        if self._around is None:
            return self._inner(*args, **kwargs)
        with self._around():
            result = self._inner(*args, **kwargs)
            if self._look is not None:
                self._look(result)
            return result

    def remove(self) -> None:
        """Take it away. One that another seam was put over stays and does nothing."""
        self._around = None
        if vars(self._strategy).get(self._name) is not self:
            return
        if isinstance(self._inner, StepSeam):
            setattr(self._strategy, self._name, self._inner)
        else:
            delattr(self._strategy, self._name)
