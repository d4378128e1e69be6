"""Replace the step of optimizers: of attached ones, and of those created during training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.optimizers.stepping.step_round import Member, StepRound
from lightning_vram.optimizers.stepping.steppable import make_twin
from lightning_vram.private_names.torch.optimizers import note_step

Step = Callable[[Callable[[], Any] | None], Any]
Owner = TypeVar("Owner")

MembersStep = Callable[[Optimizer, StepRound, Sequence[Member]], None]  # steps some parameters of an optimizer

_handles: list[tuple["ref[Any]", RemovableHandle]] = []
_owners: "WeakKeyDictionary[Optimizer, ref[StepTakeOver]]" = WeakKeyDictionary()
_stepping: list[Optimizer] = []  # in a replaced step


class StepTakeOver(ABC):
    """Base of classes that replace the step of optimizers, which stay the same objects.

    Optimizers that were never attached are attached at their first step, until :meth:`remove_patches`.
    """

    def __init__(self) -> None:
        self._taken: list[Optimizer] = []  # whose step is :meth:`_step`
        self._patches: list[Shadow] = []
        self._handle = redirect_steps(self, StepTakeOver._take_in)

    @abstractmethod
    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Call :meth:`_take_over` for the optimizers that this steps."""

    @abstractmethod
    def _has_ours(self, optimizer: Optimizer) -> bool:
        """Whether it has parameters that only this may step."""

    @abstractmethod
    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step it; its hooks run before and after."""

    def members_step(self) -> MembersStep | None:
        """Return a function that steps a few parameters of an attached optimizer; ``None``: not allowed."""
        return None

    def remove_patches(self) -> None:
        """Let all optimizers step by themselves again."""
        self._handle.remove()
        for optimizer in self._taken:
            if owner_of(optimizer) is self:
                del _owners[optimizer]
        for patch in reversed(self._patches):
            patch.remove()

    @staticmethod
    def _run_closure(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Begin a step: note it for schedulers, and return the loss."""
        note_step(optimizer)
        with torch.enable_grad():
            return None if closure is None else closure()

    def _take_over(self, optimizer: Optimizer) -> None:
        self._taken.append(optimizer)
        _owners[optimizer] = ref(self)
        self._patch_step(optimizer, self._step)

    def _patch_step(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        # Hooks run once per step, and see the optimizer unchanged.
        call = partial(self._call, Optimizer.profile_hook_step(step), optimizer)
        self._patches.append(Shadow(optimizer, "step", instead(call)))

    def _call(self, hooked_step: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        _stepping.append(optimizer)
        try:
            return hooked_step(optimizer, *args, **kwargs)
        finally:
            _stepping.pop()

    def _take_in(self, optimizer: Optimizer) -> Step | None:
        """Attach a stepping optimizer that has our parameters, and return how to continue its step."""
        if (_stepping and optimizer is _stepping[-1]) or not self._has_ours(optimizer):
            return None
        self.attach([optimizer])  # a no-op if it is attached: a step that was bound before bypasses the patch
        return partial(self._step, optimizer) if self._is_taken(optimizer) else None

    def _is_taken(self, optimizer: Optimizer) -> bool:
        return any(optimizer is one for one in self._taken)


def owner_of(optimizer: Optimizer) -> StepTakeOver | None:
    """Return the last object that took over the step of ``optimizer``."""
    owner = _owners.get(optimizer)
    return None if owner is None else owner()


def redirect_steps(owner: Owner, redirect: Callable[[Owner, Optimizer], Step | None]) -> RemovableHandle:
    """Ask ``redirect`` at every optimizer step of this process for another step; ``None``: the step is unchanged.

    The other step gets the closure, and runs between the same hooks; its errors end the step. ``owner`` is not kept
    alive; once it is gone, nothing is asked.
    """
    weak = ref(owner)

    def before_step(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        living = weak()
        step = None if living is None else redirect(living, optimizer)
        if step is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        # The running step cannot be stopped, but it begins with its closure.
        empty = make_twin(type(optimizer), vars(optimizer), [], {})
        return (empty, partial(step, closure)), {}

    _forget_the_dead()
    handle = register_optimizer_step_pre_hook(before_step)
    _handles.append((weak, handle))
    return handle


def _forget_the_dead() -> None:
    """Remove hooks of dead owners here: an owner may die while hooks are called."""
    for weak, handle in list(_handles):
        if weak() is None:
            handle.remove()
            _handles.remove((weak, handle))
