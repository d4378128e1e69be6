"""Private names of Lightning's loops: which batch steps, what a step is made of, and the data they go through.

Constants are names of methods that something of ours stands in for (``Shadow(loop, MAKE_CLOSURE, ...)``).

* ``lightning.pytorch.loops.optimization.automatic._AutomaticOptimization``: runs a step of automatic optimization
  | 2.6 - | the package cannot be imported
* ``lightning.pytorch.loops.optimization.automatic._AutomaticOptimization._make_closure``: where the closure is made
  | 2.6 - | MicroBatching fails at the start of a fit
* ``lightning.pytorch.loops.optimization.automatic._AutomaticOptimization._make_step_fn``: forward of a part | 2.6 -
  | MicroBatching fails in the first batch
* ``lightning.pytorch.loops.optimization.automatic._AutomaticOptimization._make_backward_fn``: backward of a part, and
  whether it is to be | 2.6 - | MicroBatching and AccumulationScheduler fail in a fit
* ``lightning.pytorch.loops.optimization.automatic._AutomaticOptimization._make_zero_grad_fn``: when gradients are
  zeroed | 2.6 - | EarlyRelease, MicroBatching and AccumulationScheduler fail in a fit
* ``lightning.pytorch.loops.optimization.automatic._AutomaticOptimization._optimizer_step``: the step of a window
  | 2.6 - | AccumulationScheduler fails at the start of a fit
* ``lightning.pytorch.loops.optimization.automatic._AutomaticOptimization._skip_backward``: whether
  StochasticWeightAveraging only goes through the data | 2.6 - | AccumulationScheduler fails in the first batch
* ``lightning.pytorch.plugins.precision.Precision._wrap_closure``: adds hooks and clipping to the closure of a step
  | 2.6 - | fsdp_offload and OptimizerInBackward fail in the first step
* ``lightning.pytorch.loops._TrainingEpochLoop``: goes through the batches of an epoch | 2.6 -
  | the package cannot be imported
* ``lightning.pytorch.loops._TrainingEpochLoop._accumulated_batches_reached``: whether the window ends with a batch
  | 2.6 - | AccumulationScheduler fails at the start of a fit
* ``lightning.pytorch.loops._TrainingEpochLoop._num_ready_batches_reached``: whether the epoch ends with a batch
  | 2.6 - | AccumulationScheduler fails in the first batch
* ``lightning.pytorch.loops._TrainingEpochLoop._should_accumulate``: whether no step follows a batch | 2.6 -
  | SlurmRequeue fails when it is to stop; MicroBatching and AccumulationScheduler in some fits on several ranks
* ``lightning.pytorch.loops._TrainingEpochLoop._should_check_val_fx``: whether validation follows a batch | 2.6 -
  | SlurmRequeue fails when it is to stop
* ``lightning.pytorch.loops._FitLoop``: goes through the epochs | 2.6 - | the package cannot be imported
* ``lightning.pytorch.loops._FitLoop._combined_loader``: the training data, once it is set up | 2.6 -
  | AccumulationScheduler and SlurmRequeue fail when the data is set up
* ``lightning.pytorch.loops._FitLoop._data_source``: what training data comes from | 2.6 -
  | MemoryBudget cannot tell whether a run fits, and says so
* ``lightning.pytorch.utilities.combined_loader.CombinedLoader._mode``: how batches of several loaders are combined
  | 2.6 - | MemoryBudget takes them to come together
* ``lightning.pytorch.loops._FitLoop._load_combined_loader_states``: right before the data is iterated over | 2.6 -
  | SlurmRequeue fails at the start of a fit
* ``lightning.pytorch.loops.loop._Loop``: the base of loops | 2.6 - | the package cannot be imported
* ``lightning.pytorch.loops.loop._Loop._restarting``: whether a loop goes on from a checkpoint | 2.6 -
  | a scheduler that follows a metric misses its step at the end of an epoch that was resumed
* ``lightning.pytorch.loops._EvaluationLoop._is_sequential``: whether one loader follows the other | 2.6 -
  | SlurmRequeue takes all loaders to do so, and ranks may wait for a vote that does not come
* ``lightning.pytorch.Trainer._active_loop``: the loop that evaluates | 2.6 -
  | SlurmRequeue fails at the start of an evaluation
* ``lightning.pytorch.loops.utilities._block_parallel_sync_behavior``: a backward that does not reduce gradients
  | 2.6 - | the package cannot be imported
* ``lightning.pytorch.trainer.call._call_callback_hooks``: tells callbacks of the gradients of a batch | 2.6 -
  | MicroBatching fails in the first batch
* ``lightning.pytorch.trainer.call._call_lightning_module_hook``: tells the module | 2.6 -
  | MicroBatching fails in the first batch
* ``lightning.fabric.utilities.data._set_sampler_epoch``: the order in which a sampler shuffles | 2.6 -
  | the package cannot be imported
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
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
    """Make what zeroes gradients; ``None`` where the batch does not begin a window."""
    return loop._make_zero_grad_fn(batch_idx, optimizer)


def is_loops_closure(closure: Any, *, is_bare: bool) -> bool:
    """Whether a closure is that of automatic optimization, and nobody has put another around it.

    Args:
        closure: That an optimizer is given.
        is_bare: Whether it is one that has not yet come to the precision plugin.
    """
    while getattr(closure, "__module__", "").startswith("lightning_vram."):  # a tracker's
        closure = getattr(closure, "__wrapped__", None)
    if not is_bare:  # else it went past the plugin
        is_plugins = isinstance(closure, partial) and getattr(closure.func, "__func__", None) is Precision._wrap_closure
        closure = closure.args[-1] if is_plugins else None
    return type(closure) is Closure


def skips_backward(loop: AutomaticOptimization) -> bool:
    """Whether batches only run forward, as in the last epoch of StochasticWeightAveraging."""
    return loop._skip_backward


def epoch_ends(loop: _TrainingEpochLoop) -> bool:
    """Whether the epoch ends with the batch under way, as far as is known."""
    return loop._num_ready_batches_reached()


def is_accumulating(loop: _TrainingEpochLoop) -> bool:
    """Whether no step follows the batch under way."""
    return loop._should_accumulate()


def validation_follows(loop: _TrainingEpochLoop, fetcher: Any) -> bool:
    """Whether validation follows the batch under way."""
    return loop._should_check_val_fx(fetcher)


def training_data(loop: _FitLoop) -> CombinedLoader | None:
    """Return the training loaders; ``None`` before they are set up."""
    return loop._combined_loader


def training_source(trainer: pl.Trainer) -> Any:
    """Return the module, the datamodule or the loaders that training data comes from."""
    return trainer.fit_loop._data_source.instance


def takes_turns(loader: CombinedLoader) -> bool:
    """Whether one loader follows the other; else each batch is made of one of each."""
    return getattr(loader, "_mode", "") == "sequential"


def set_sampler_epoch(loader: object, epoch: int) -> None:
    """Let the sampler of a loader shuffle as in an epoch."""
    _set_sampler_epoch(loader, epoch)


def stop_restarting(loop: _Loop) -> None:
    """Let a loop take itself for one that has not been loaded; not those inside of it."""
    loop._restarting = False


def stop_restarting_all(loop: _Loop) -> None:
    """The same, with the loops inside of it."""
    # The setter of the fit loop itself sets it again where max_steps is given.
    _Loop.restarting.fset(loop, restarting=False)  # type: ignore[attr-defined]


def is_sequential(trainer: pl.Trainer) -> bool:
    """Whether the running evaluation goes through one loader after the other."""
    return bool(getattr(trainer._active_loop, "_is_sequential", True))  # that of prediction always does


def blocked_sync(strategy: Strategy, *, block: bool = True) -> AbstractContextManager[None]:
    """Keep ranks from reducing gradients in a backward, if ``block``."""
    return _block_parallel_sync_behavior(strategy, block=block)


def call_hook(trainer: pl.Trainer, name: str) -> None:
    """Call a hook of all callbacks, and then of the module."""
    call._call_callback_hooks(trainer, name)
    call._call_lightning_module_hook(trainer, name)
