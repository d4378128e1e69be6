"""Patch a method of one object, for a time."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any


class Shadow:
    """Replaces ``getattr(owner, name)`` on this one object by ``make(original)``, until :meth:`remove`."""

    _wrapped_by_lr_sched = True  # else schedules warn of an optimizer's overridden step, or cannot wrap it

    def __init__(self, owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._owner = owner
        self._name = name
        self._inner = getattr(owner, name)
        self._has_own = name in vars(owner)
        self._is_removed = False
        self._call = make(self._inner)
        vars(owner)[name] = self  # past nn.Module's way to set attributes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement, or after :meth:`remove` the original."""
        return self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """In a copy of the owner, such as a worker process gets of the trainer, nothing is patched.

        Optimizers leave what is on the instance out of theirs. If the original is a method, the pickle can be read
        without this package.
        """
        if isinstance(self._inner, MethodType):
            return getattr, (self._inner.__self__, self._inner.__name__)
        return _pass_on, (self._inner,)

    def remove(self) -> None:
        """Put the original back. Calling it again does nothing."""
        self._is_removed = True
        self._call = self._inner  # one that somebody else's stand-in was put over stays, and passes calls on
        attributes = vars(self._owner)
        if attributes.get(self._name) is not self:
            return
        below = self
        while isinstance(below._inner, Shadow) and below._inner._is_removed:
            below = below._inner
        if below._has_own:
            attributes[self._name] = below._inner
        else:
            del attributes[self._name]


def instead(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``make``: ``call`` is called, and the original is not."""
    return partial(_return_first, call)


def _return_first(call: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    return call


def _pass_on(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Stand for a patch in a pickle."""
    return inner
