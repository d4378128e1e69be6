"""Let a module run something else by changing its class, and change it back.

Names, ``state_dict``, ``torch.compile(fullgraph=True)`` and FSDP2 see the module they know; copies and pickles are
plain modules, so that a file does not need this package. Wrappers, patched ``forward`` methods and hooks each break
one of these. Several techniques may take one module, each under its own key: the last one runs first, and they are
undone in any order.
"""

import copyreg
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Run = Callable[..., Any]
"""Called with the module, its state, its plain ``forward`` and the arguments; returns what ``forward`` returns."""

_KEY = "_lightning_vram_swap_key"  # on our classes: no name that a user's class has
FORWARD = "_lightning_vram_forward"  # on instances: a forward of their own, which would hide ours

_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}  # made once, so that types compare


class _Swapped:
    """Mixed in before the class of a swapped module, once however often it is swapped."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep registries and checks that the user's classes hang here from seeing ours."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        kinds = type(self).__mro__
        original, keys = kinds[kinds.index(_Swapped) + 1], {key_of(kind) for kind in kinds}
        if rest and isinstance(rest[0], dict):
            attributes = {name: value for name, value in rest[0].items() if name not in keys and name != FORWARD}
            rest[0] = attributes | ({"forward": rest[0][FORWARD]} if FORWARD in rest[0] else {})
        arguments = tuple(original if argument is type(self) else argument for argument in arguments)
        if make is getattr(copyreg, "__newobj__", None) and len(arguments) == 1:
            # pickle insists that __newobj__ makes the class of the very object; its elder does the same work
            make, arguments = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return make, arguments, *rest


def swap_class(module: nn.Module, key: str, state: object, run: Run) -> None:
    """Let ``module`` run ``run`` in the place of its ``forward`` as long as ``key`` is in its ``__dict__``.

    Args:
        module: Any module. A ``forward`` on the instance is taken for the plain one meanwhile.
        key: Name of the technique; the state is kept under it.
        state: Handed to ``run``.
        run: See :data:`Run`. Always the same function for the same class and key.

    Raises:
        ValueError: If the class cannot be changed, or ``key`` is in it already.
    """
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):  # traced ones too
        raise ValueError(f"module {name} cannot be changed: it is scripted or traced.")
    if key in vars(module):
        raise ValueError(f"module {name} cannot be changed: it has been already.")
    if all(key_of(kind) != key for kind in type(module).__mro__):  # else it is idle below another class, and wakes
        try:
            module.__class__ = _swapped_class(type(module), key, run)
        except TypeError as error:
            raise ValueError(f"module {name} cannot be changed: {error}.") from None
    vars(module)[key] = state
    if "forward" in vars(module):
        vars(module)[FORWARD] = vars(module).pop("forward")


def restore_class(module: nn.Module, key: str) -> None:
    """Undo :func:`swap_class`; one that another class was put over (FSDP2) stays and is idle. Twice does nothing."""
    vars(module).pop(key, None)
    # What is idle on top goes, whoever left it there; below a technique still at work it has to wait for that one.
    while (top := key_of(type(module))) is not None and top not in vars(module):
        module.__class__ = type(module).__bases__[-1]
    if FORWARD in vars(module) and not any(key_of(kind) in vars(module) for kind in type(module).__mro__):
        vars(module)["forward"] = vars(module).pop(FORWARD)


def _swapped_class(original: type[nn.Module], key: str, run: Run) -> type[nn.Module]:
    if (original, key) not in _classes:
        _classes[original, key] = _make_class(original, key, run)
    return _classes[original, key]


def _make_class(original: type[nn.Module], key: str, run: Run) -> type[nn.Module]:
    is_further = issubclass(original, _Swapped)  # above another of ours, which knows about the instance

    @functools.wraps(original.forward)  # transformers and others inspect the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inherited: Any = super(swapped, self)
        plain = inherited.forward if is_further else self.__dict__.get(FORWARD, inherited.forward)
        if key not in self.__dict__:
            return plain(*args, **kwargs)
        return run(self, self.__dict__[key], plain, *args, **kwargs)

    # The same name, so that printed models and policies that go by class name see no change.
    attributes = {"forward": forward, _KEY: key, "__module__": original.__module__}
    metaclass: Any = type(original)
    bases = (original,) if is_further else (_Swapped, original)
    swapped: type[nn.Module] = metaclass(original.__name__, bases, attributes | {"__qualname__": original.__qualname__})
    return swapped


def key_of(kind: type) -> str | None:
    """The key that ``kind`` itself was made for, not one of its bases; ``None`` for a class of others."""
    key: str | None = vars(kind).get(_KEY)
    return key


def plain_class_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of the class of ``module``, as if it were not swapped."""
    kinds = type(module).__mro__
    # not getattr: scripted classes raise
    forwards = (vars(kind)["forward"] for kind in kinds if "forward" in vars(kind) and key_of(kind) is None)
    forward: Callable[..., Any] = next(forwards)
    return forward
