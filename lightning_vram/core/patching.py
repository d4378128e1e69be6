"""Swap a module's class, patch a method of one object, hold a process-wide setting; each with an undo.

After a swap, names, ``state_dict``, ``torch.compile(fullgraph=True)`` and FSDP2 see the module they know, and copies
and pickles are ordinary modules; wrappers, patched ``forward`` methods and hooks each break one of these. Several
techniques may take one module, each under its own key: the last one runs first; undo in any order. May import: memory.
"""

import copy
import copyreg
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from lightning_vram.private_names.dispatcher import has_backward_autocast, read_backward_autocast, set_backward_autocast

Run = Callable[..., Any]
"""Called with the module, its state, its plain ``forward`` and the arguments; returns what ``forward`` returns."""

_TECHNIQUE = "_lightning_vram_technique"  # on our classes: no name that a user's class has
_FORWARD = "_lightning_vram_forward"  # on instances: a forward of their own, which would hide ours


class _Technique(NamedTuple):
    key: str
    run: Run
    in_copies: bool


_classes: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}  # made once, so that types compare


class _Swapped:
    """Mixed in before the class of a swapped module, once however often it is swapped."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep registries and checks that the user's classes hang here from seeing ours."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        kinds = type(self).__mro__
        original, techniques = kinds[kinds.index(_Swapped) + 1], list(filter(None, map(_technique_of, kinds)))
        swaps = tuple(
            (key, copy.copy(vars(self)[key]), run)
            for key, run, in_copies in reversed(techniques)
            if in_copies and key in vars(self)
        )
        if rest and isinstance(rest[0], dict):
            keys = {technique.key for technique in techniques}
            attributes = {name: value for name, value in rest[0].items() if name not in keys and name != _FORWARD}
            parked = _FORWARD if swaps else "forward"
            rest[0] = attributes | ({parked: rest[0][_FORWARD]} if _FORWARD in rest[0] else {})
        arguments = tuple(original if argument is type(self) else argument for argument in arguments)
        if make is getattr(copyreg, "__newobj__", None) and len(arguments) == 1:
            # pickle insists that __newobj__ makes the class of the very object; its elder does the same work
            make, arguments = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return (_make_swapped, (make, arguments, swaps), *rest) if swaps else (make, arguments, *rest)


def _make_swapped(make: Callable[..., Any], arguments: tuple[Any, ...], swaps: tuple[Any, ...]) -> nn.Module:
    module: nn.Module = make(*arguments)
    for key, state, run in swaps:
        swap_class(module, key, state, run, in_copies=True)
    return module


def swap_class(
    module: nn.Module, key: str, state: object, run: Run, *, in_copies: bool = False, is_lowest: bool = False
) -> None:
    """Let ``module`` run ``run`` in the place of its ``forward`` as long as ``key`` is in its ``__dict__``.

    ``state`` is stored under ``key``, the name of the technique, and handed to ``run``, which must be the same function
    for the same class and key. ``in_copies``: copies and pickles are swapped as well, each with a copy of the state,
    which holds no module; pickles find ``run`` by its name, and only :func:`restore_class` undoes their swap.
    ``is_lowest``: it runs last, below techniques that came before and above classes of others.
    """
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):  # traced ones too
        raise ValueError(f"module {name} cannot be changed: it is scripted or traced.")
    if key in vars(module):
        raise ValueError(f"module {name} cannot be changed: it already was.")
    if all(_key_of(kind) != key for kind in type(module).__mro__):  # else it is idle below another class, and wakes
        technique = _Technique(key, run, in_copies)
        try:
            module.__class__ = _swapped_class(type(module), technique, is_lowest=is_lowest)
        except TypeError as error:
            raise ValueError(f"module {name} cannot be changed: {error}.") from None
    vars(module)[key] = state
    if "forward" in vars(module):
        vars(module)[_FORWARD] = vars(module).pop("forward")


def restore_class(module: nn.Module, key: str) -> None:
    """Undo :func:`swap_class`; one that another class was put over (FSDP2) stays and is idle. Twice does nothing."""
    vars(module).pop(key, None)
    _drop_idle(module)
    is_ours = any(_key_of(kind) in vars(module) for kind in type(module).__mro__)
    if _FORWARD in vars(module) and "forward" not in vars(module) and not is_ours:  # else what wraps ours calls it
        vars(module)["forward"] = vars(module).pop(_FORWARD)


class Swaps:
    """Modules that are swapped under one key and restored together: the undo of a technique."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.modules: list[nn.Module] = []

    def add(
        self, module: nn.Module, state: object, run: Run, *, in_copies: bool = False, is_lowest: bool = False
    ) -> None:
        """See :func:`swap_class`."""
        swap_class(module, self._key, state, run, in_copies=in_copies, is_lowest=is_lowest)
        self.modules.append(module)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Restore what was added if the block fails."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Give every module its class back. Calling it again does nothing."""
        while self.modules:
            restore_class(self.modules.pop(), self._key)


def mixin_for(mixin: type, original: type) -> type:
    """Return ``mixin``, or a class derived from it, whose ``__dict__`` has the offset that ``original`` demands."""
    kind = original
    while kind.__base__ is not None and kind.__base__.__dictoffset__:
        kind = kind.__base__
    start = kind.__base__
    if start is None or start is object:
        return mixin
    # Generic refuses to be a base without parameters, unless it reads of other bases as they were written
    return type(start)(mixin.__name__, (start, mixin), {"__orig_bases__": (mixin,)})


def remove_mixin(module: nn.Module, mixin: type) -> None:
    """Remove the class into which FSDP2 mixed ``mixin``, also from below what has been swapped since."""
    module.__class__ = _without(type(module), mixin)
    _drop_idle(module)


def _without(kind: type[nn.Module], mixin: type) -> type[nn.Module]:
    technique = _technique_of(kind)
    if technique is not None:
        return _swapped_class(_without(kind.__bases__[-1], mixin), technique)
    first = kind.__bases__[0]
    is_mixed_in = first is mixin or (mixin in first.__bases__ and first.__name__ == mixin.__name__)  # of mixin_for
    return kind.__bases__[-1] if is_mixed_in else kind


def _drop_idle(module: nn.Module) -> None:
    # Only idle classes on top are removed: those below a technique in use have to wait for that one.
    while (top := _key_of(type(module))) is not None and top not in vars(module):
        module.__class__ = type(module).__bases__[-1]


def _swapped_class(original: type[nn.Module], technique: _Technique, *, is_lowest: bool = False) -> type[nn.Module]:
    upper = _technique_of(original) if is_lowest else None
    if upper is not None:
        return _swapped_class(_swapped_class(original.__bases__[-1], technique, is_lowest=True), upper)
    if (original, technique.key) not in _classes:
        _classes[original, technique.key] = _make_class(original, technique)
    return _classes[original, technique.key]


def _make_class(original: type[nn.Module], technique: _Technique) -> type[nn.Module]:
    key, run = technique.key, technique.run
    is_further = issubclass(original, _Swapped)  # above another of ours, which knows about the instance

    @functools.wraps(original.forward)  # transformers and others inspect the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # It may have been restored, while somebody who has wrapped this method still calls it.
        lower: Any = super(swapped, self) if isinstance(self, swapped) else None
        inherited = original.forward.__get__(self) if lower is None else lower.forward
        plain = inherited if is_further else self.__dict__.get(_FORWARD, inherited)
        if key not in self.__dict__:
            return plain(*args, **kwargs)
        return run(self, self.__dict__[key], plain, *args, **kwargs)

    # The same name, so that printed models and policies that go by class name see no change.
    attributes = {"forward": forward, _TECHNIQUE: technique, "__module__": original.__module__}
    metaclass: Any = type(original)
    bases = (original,) if is_further else (_Swapped, original)
    swapped: type[nn.Module] = metaclass(original.__name__, bases, attributes | {"__qualname__": original.__qualname__})
    return swapped


def _technique_of(kind: type) -> _Technique | None:
    """What ``kind`` itself was made for, not one of its bases; ``None`` for a class of others."""
    return vars(kind).get(_TECHNIQUE)


def _key_of(kind: type) -> str | None:
    technique = _technique_of(kind)
    return None if technique is None else technique.key


def has_own_forward(module: nn.Module) -> bool:
    """Whether there is a ``forward`` on the instance."""
    return "forward" in vars(module) or _FORWARD in vars(module)


def plain_class_forward(module: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of the class of ``module``, as if it were not swapped."""
    kinds = type(module).__mro__
    # not getattr: scripted classes raise
    return next(vars(kind)["forward"] for kind in kinds if "forward" in vars(kind) and _key_of(kind) is None)  # type: ignore[no-any-return]


class MethodPatch:
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
        """In a copy of the owner, such as a worker process gets, nothing is patched. A method needs no package here."""
        if isinstance(self._inner, MethodType):
            return getattr, (self._inner.__self__, self._inner.__name__)
        return _pass_on, (self._inner,)

    def remove(self) -> None:
        """Put the original back. Calling it again does nothing."""
        self._is_removed = True
        self._call = self._inner  # below a patch of others it stays, and passes calls on
        attributes = vars(self._owner)
        if attributes.get(self._name) is not self:
            return
        below = self
        while isinstance(below._inner, MethodPatch) and below._inner._is_removed:
            below = below._inner
        if below._has_own:
            attributes[self._name] = below._inner
        else:
            del attributes[self._name]


def replace_by(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``make``: ``call`` is called, and the original is not."""
    return lambda inner: call


def _pass_on(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Stand for a patch in a pickle."""
    return inner


Setting = TypeVar("Setting")


class HeldSetting(Generic[Setting]):
    """A setting that several may hold at ``value``, in any order and thread: the last one puts it back."""

    def __init__(self, read: Callable[[], Setting], write: Callable[[Setting], None], value: Setting) -> None:
        self._read, self._write, self._value = read, write, value
        self._before = value
        self._num_holders = 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold it inside the block."""
        self.acquire()
        try:
            yield
        finally:
            self.release()

    def acquire(self) -> None:
        """Hold it from now on."""
        with self._lock:
            if self._num_holders == 0:
                self._before = self._read()
                self._write(self._value)
            self._num_holders += 1

    def release(self) -> None:
        """Hold it no longer, once for each :meth:`acquire`."""
        with self._lock:
            self._num_holders -= 1
            if self._num_holders == 0:
                self._write(self._before)


_fast_path = HeldSetting(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, value=False)
_backward_autocast = HeldSetting(read_backward_autocast, set_backward_autocast, value="off")


def without_fast_path() -> AbstractContextManager[None]:
    """Let transformer layers call their inner layers in evaluations too: the fast path reads weights by itself."""
    return _fast_path.hold()


def compiled_backward_without_autocast() -> AbstractContextManager[None]:
    """Let what is compiled inside the block have a backward that does not autocast, as in eager mode.

    By default it is traced under the autocast of the forward: compiled float32 parts would have 16-bit gradients.
    """
    return _backward_autocast.hold() if has_backward_autocast else nullcontext()
