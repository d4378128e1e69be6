"""Let an object stand in for the ``forward`` of one module, also in its copies and in its pickles.

:func:`~lightning_vram.techniques.class_swap.swap_class` gives copies the plain class. What decides in which precision
a module computes has to go along: the copy that an average of the weights runs, and the file that is loaded to
predict, compute as the module did. Hence an object in ``vars(module)["forward"]`` that holds the module: a copy holds
the copy, keys and names are unchanged, and ``torch.compile(fullgraph=True)`` traces through it. Loading such a pickle
takes this package. Not for :class:`torch.nn.DataParallel`, whose replicas share what is in ``vars``.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lightning_vram.techniques.class_swap import FORWARD as _PARKED  # where class_swap puts a forward that it hides
from lightning_vram.techniques.class_swap import key_of, plain_class_forward


class ForwardStandIn(ABC):
    """Runs in the place of ``module.forward`` between :meth:`put` and :meth:`remove`.

    Args:
        module: Any module that is not scripted. A ``forward`` on the instance is taken for the plain one, and is put
            back. The class may be swapped before or after, and put back before or after.
        device_type: Whose autocast is meant, ``"cuda"`` or ``"cpu"``.
    """

    is_below_swapped_classes = False  # or else above them, where the user's own forward allows it

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self.module = module
        self.device_type = device_type
        self._inner: Callable[..., Any] | None = None
        self._is_removed = False

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do what is done in the place of ``forward``, with its arguments and its result."""

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """Call what this stands in for."""
        if self._inner is not None:
            return self._inner(*args, **kwargs)
        return _class_forward(self.module)(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of ``forward``, or after :meth:`remove` call it: somebody may still hold this."""
        return self.plain(*args, **kwargs) if self._is_removed else self.run(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:  # transformers and others inspect it
        if self._inner is not None:
            return inspect.signature(self._inner)
        return inspect.signature(_class_forward(self.module).__get__(self.module))

    def put(self) -> None:
        """Stand in from now on.

        Raises:
            ValueError: If the module is scripted or traced.
        """
        if isinstance(self.module, torch.jit.ScriptModule):  # traced ones too
            name = getattr(self.module, "original_name", type(self.module).__name__)
            raise ValueError(
                f"module {name} cannot change its precision: it is scripted or traced. Script or trace it afterwards."
            )
        attributes = vars(self.module)
        # class_swap, when it ends, puts a parked forward back over whatever is there: then stand in for the parked one.
        is_swapped = any(key_of(kind) in attributes for kind in type(self.module).__mro__)
        is_parked = _PARKED in attributes or (self.is_below_swapped_classes and is_swapped)
        name = _PARKED if is_parked else "forward"
        self._inner = attributes.get(name)
        attributes[name] = self  # past nn.Module's way to set attributes

    def remove(self) -> None:
        """Put back what was there. Calling it again does nothing."""
        self._is_removed = True  # one that somebody else's stand-in was put over stays, and passes calls on
        below = self._inner
        while isinstance(below, ForwardStandIn) and below._is_removed:
            below = below._inner
        attributes = vars(self.module)
        for name in ("forward", _PARKED):
            if attributes.get(name) is self:
                attributes.update({name: below}) if below is not None else attributes.pop(name)


class ForwardHandle:
    """Undoes what put stand-ins.

    Args:
        stand_ins: They are put at once, all or none.

    Raises:
        ValueError: If one of the modules is scripted or traced.
    """

    def __init__(self, stand_ins: Iterable[ForwardStandIn]) -> None:
        self._stand_ins: list[ForwardStandIn] = []
        try:
            for stand_in in stand_ins:
                stand_in.put()
                self._stand_ins.append(stand_in)
        except BaseException:
            self.remove()
            raise
        self.num_modules = len(self._stand_ins)
        """Modules that were changed."""

    def remove(self) -> None:
        """Give every module its ``forward`` back; copies made meanwhile keep theirs. Twice does nothing."""
        while self._stand_ins:
            self._stand_ins.pop().remove()


def _class_forward(module: nn.Module) -> Callable[..., Any]:
    """What the class does: without our swapped classes if it is they who call the stand-in."""
    if _PARKED not in vars(module):
        return type(module).forward
    return plain_class_forward(module)


def has_own_forward(module: nn.Module) -> bool:
    """Whether there is a ``forward`` on the instance."""
    return "forward" in vars(module) or _PARKED in vars(module)
