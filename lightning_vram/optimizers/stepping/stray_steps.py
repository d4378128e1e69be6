"""Step otherwise, in optimizers that nobody has told of: those that are made in the midst of training."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import ref

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

Step = Callable[[Callable[[], Any] | None], Any]
Owner = TypeVar("Owner")

_handles: list[tuple["ref[Any]", RemovableHandle]] = []


def redirect_steps(owner: Owner, redirect: Callable[[Owner, Optimizer], Step | None]) -> RemovableHandle:
    """Ask, whenever any optimizer of this process steps, whether something else is to be done instead.

    Args:
        owner: Is not kept alive. When it is gone, nothing is asked.
        redirect: Gets the owner and the optimizer. Returns what is called with the closure in place of the step as its
            class has it, between the same hooks; ``None``: the step is left alone. Whatever it raises ends the step.

    Returns:
        A handle whose ``remove`` ends it.
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
        # The step under way cannot be stopped, but a step begins with its closure.
        return (_without_parameters(optimizer), partial(step, closure)), {}

    _forget_the_dead()
    handle = register_optimizer_step_pre_hook(before_step)
    _handles.append((weak, handle))
    return handle


def _forget_the_dead() -> None:
    """Take away hooks whose owners went without a word; not when they go, which may be while hooks are called."""
    for weak, handle in list(_handles):
        if weak() is None:
            handle.remove()
            _handles.remove((weak, handle))


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """One of the same class that has nothing to step."""
    empty = object.__new__(type(optimizer))
    vars(empty).update(vars(optimizer), param_groups=[], state={})
    return empty
