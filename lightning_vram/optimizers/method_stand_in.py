"""Let another callable stand in for a method of one optimizer, for a time.

Copies and pickles of an optimizer leave its instance attributes out, and so a stand-in too.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class MethodStandIn:
    """Stands in for ``getattr(optimizer, name)`` on this one object, until :meth:`remove`.

    Args:
        optimizer: Whose method it is.
        name: Of the method.
        call: What is called instead, with the arguments of the method.
    """

    _wrapped_by_lr_sched = True  # else a scheduler warns of an overridden step, or cannot wrap it

    def __init__(self, optimizer: Optimizer, name: str, call: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._name = name
        self._has_own = name in vars(optimizer)
        self.inner: Callable[..., Any] = getattr(optimizer, name)
        self._call = call
        vars(optimizer)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands in, or after :meth:`remove` what was there."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any]]]:
        """In a copy nothing stands in."""
        return _pass_on, (self.inner,)

    def remove(self) -> None:
        """Put back what was there. Calling it again does nothing."""
        self._call = self.inner  # one that somebody else's was put over stays, and passes calls on
        attributes = vars(self._optimizer)
        if attributes.get(self._name) is not self:
            return
        if self._has_own:
            attributes[self._name] = self.inner
        else:
            del attributes[self._name]


def _pass_on(inner: Callable[..., Any]) -> Callable[..., Any]:
    return inner
