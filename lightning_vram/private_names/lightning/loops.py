"""Lightning's loops: which batch steps, what a step is made of, and its data."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer

AutomaticOptimization = _AutomaticOptimization

LOAD_LOADER_STATES = "_load_combined_loader_states"  # of the fit loop
WINDOW_ENDS = "_accumulated_batches_reached"  # of the epoch loop
MAKE_CLOSURE = "_make_closure"  # of automatic optimization, and so are those that follow
MAKE_BACKWARD = "_make_backward_fn"
MAKE_ZERO_GRAD = "_make_zero_grad_fn"
OPTIMIZER_STEP = "_optimizer_step"


def make_step(loop: AutomaticOptimization, kwargs: OrderedDict[str, Any]) -> Callable[[], ClosureResult]:
    """Make what calls ``training_step`` with ``kwargs``."""
    return loop._make_step_fn(kwargs)


def make_backward(loop: AutomaticOptimization, optimizer: Optimizer) -> Callable[[Tensor], None] | None:
    """Make the backward of a loss; ``None`` where there is to be none."""
    return loop._make_backward_fn(optimizer)


def make_zero_grad(loop: AutomaticOptimization, batch_idx: int, optimizer: Optimizer) -> Callable[[], None] | None:
    """Make what zeroes gradients; ``None`` within gradient accumulation."""
    return loop._make_zero_grad_fn(batch_idx, optimizer)


def is_loops_closure(closure: Any, *, is_bare: bool) -> bool:
    """Whether a closure is Lightning's own, not wrapped; ``is_bare``: it has not come to the precision plugin yet."""
    while getattr(closure, "__module__", "").startswith("lightning_vram."):  # a tracker's
        closure = getattr(closure, "__wrapped__", None)
    if not is_bare:  # else it went past the plugin
        is_plugins = isinstance(closure, partial) and getattr(closure.func, "__func__", None) is Precision._wrap_closure
        closure = closure.args[-1] if is_plugins else None
    return type(closure) is Closure


skips_backward: Callable[[AutomaticOptimization], bool] = attrgetter("_skip_backward")
"""Whether batches only run forward, as in the last epoch of StochasticWeightAveraging."""
epoch_ends: Callable[[_TrainingEpochLoop], bool] = methodcaller("_num_ready_batches_reached")
"""Whether the epoch ends with the batch under way, as far as is known."""
is_accumulating: Callable[[_TrainingEpochLoop], bool] = methodcaller("_should_accumulate")
"""Whether no step follows the batch under way."""


def validation_follows(loop: _TrainingEpochLoop, fetcher: Any) -> bool:
    """Whether validation follows the batch under way."""
    return loop._should_check_val_fx(fetcher)


training_data: Callable[[_FitLoop], CombinedLoader | None] = attrgetter("_combined_loader")
"""Return the training loaders; ``None`` before they are set up."""
training_source: Callable[[pl.Trainer], Any] = attrgetter("fit_loop._data_source.instance")
"""Return the module, the datamodule or the loaders that training data comes from."""


def takes_turns(loader: CombinedLoader) -> bool:
    """Whether one loader follows the other; else each batch is made of one of each."""
    return getattr(loader, "_mode", "") == "sequential"


set_sampler_epoch: Callable[[object, int], None] = _set_sampler_epoch
"""Let the sampler of a loader shuffle as in an epoch."""


def stop_restarting(loop: _Loop) -> None:
    """Let a loop take itself for one that has not been loaded; not those inside of it."""
    loop._restarting = False


def stop_restarting_all(loop: _Loop) -> None:
    """Let a loop and the loops inside of it take themselves for ones that have not been loaded."""
    # The setter of the fit loop itself sets it again where max_steps is given.
    _Loop.restarting.fset(loop, restarting=False)  # type: ignore[attr-defined]


def is_sequential(trainer: pl.Trainer) -> bool:
    """Whether the running evaluation goes through one loader after the other."""
    return bool(getattr(trainer._active_loop, "_is_sequential", True))  # that of prediction always does


blocked_sync: Callable[..., AbstractContextManager[None]] = _block_parallel_sync_behavior
"""Keep the ranks of a strategy from reducing gradients in a backward, if ``block``."""


def call_hook(trainer: pl.Trainer, name: str) -> None:
    """Call a hook of all callbacks, and then of the module."""
    call._call_callback_hooks(trainer, name)
    call._call_lightning_module_hook(trainer, name)
