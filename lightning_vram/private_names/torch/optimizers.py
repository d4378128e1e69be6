"""Hooks of optimizers, and marks of the learning-rate schedulers."""

from types import FunctionType
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils

FOREACH_TYPES: tuple[list[Any], ...] = (_foreach_supported_types, _foreach_utils._foreach_supported_types)
"""The lists of the classes of tensors that are worked on at once."""
LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
"""Names in ``vars`` of an optimizer of what runs before and after it loads a state."""


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether hooks run before the step of ``optimizer``."""
    return bool(optimizer._optimizer_step_pre_hooks)


def note_step(optimizer: Optimizer) -> None:
    """Mark for learning-rate schedulers that ``optimizer`` stepped."""
    vars(optimizer)["_opt_called"] = True


def is_wrapped_by_scheduler(step: object) -> bool:
    """Whether ``step`` is what a scheduler puts on an optimizer: it only notes that it was called."""
    return isinstance(step, FunctionType) and hasattr(step, "_wrapped_by_lr_sched")
