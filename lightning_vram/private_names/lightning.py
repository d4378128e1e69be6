"""Private names of Lightning: Trainer, loops, logging, strategies, callbacks, files, command line."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _get_default_dtype,
    _Metadata,
    _ResultCollection,
)
from lightning.pytorch.tuner.lr_finder import _LRCallback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI  # which every run would load, for the command alone

SIGTERM_HANDLER = "_sigterm_notifier_fn"  # of the connector of signals


cluster_environment: Callable[[pl.Trainer], Any] = attrgetter("_accelerator_connector.cluster_environment")
"""Return the environment that started the processes."""
checkpoint_connector: Callable[[pl.Trainer], Any] = attrgetter("_checkpoint_connector")
"""Return the connector that loads checkpoints, by ``resume_start`` and ``restore``."""


def log_nothing(trainer: pl.Trainer) -> None:
    """Keep the loggers, but send them no metrics."""
    trainer._logger_connector.log_metrics = lambda *_, **__: None  # type: ignore[method-assign]


def notes_of_run(trainer: pl.Trainer) -> dict[str, Any]:
    """Return notes that last until the next run of ``trainer`` begins, or its data are attached."""
    notes: dict[str, Any] = vars(trainer._data_connector._datahook_selector).setdefault("lightning_vram", {})
    return notes


signal_connector: Callable[[pl.Trainer], Any] = attrgetter("_signal_connector")
"""Return the connector that handles signals, until its ``teardown``."""


def validates_by_clock(trainer: pl.Trainer) -> bool:
    """Whether validation runs after some time, not after a number of batches."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


find_trainer: Callable[[pl.LightningModule], pl.Trainer | None] = attrgetter("_trainer")
"""Return the trainer of a module; ``None`` where the public property raises."""

AutomaticOptimization = _AutomaticOptimization
LOAD_LOADER_STATES = "_load_combined_loader_states"  # of the fit loop
WINDOW_ENDS = "_accumulated_batches_reached"  # of the epoch loop
MAKE_CLOSURE = "_make_closure"  # of automatic optimization, as the next three
MAKE_BACKWARD = "_make_backward_fn"
MAKE_ZERO_GRAD = "_make_zero_grad_fn"
OPTIMIZER_STEP = "_optimizer_step"


make_step: Callable[..., Callable[[], ClosureResult]] = AutomaticOptimization._make_step_fn
"""Return a function that calls ``training_step`` with keyword arguments."""


def is_loops_closure(closure: Any, *, is_bare: bool) -> bool:
    """Whether a closure is Lightning's own, unwrapped; ``is_bare``: not by the precision plugin either, so far."""
    while getattr(closure, "__module__", "").startswith("lightning_vram."):  # a tracker's
        closure = getattr(closure, "__wrapped__", None)
    if not is_bare:  # otherwise the plugin has wrapped it
        is_plugins = isinstance(closure, partial) and getattr(closure.func, "__func__", None) is Precision._wrap_closure
        closure = closure.args[-1] if is_plugins else None
    return type(closure) is Closure


skips_backward: Callable[[AutomaticOptimization], bool] = attrgetter("_skip_backward")
"""Whether batches only run forward, as in the last epoch of StochasticWeightAveraging."""
epoch_ends: Callable[[_TrainingEpochLoop], bool] = methodcaller("_num_ready_batches_reached")
"""Whether the epoch ends with the current batch, as far as is known."""
is_accumulating: Callable[[_TrainingEpochLoop], bool] = methodcaller("_should_accumulate")
"""Whether no optimizer step follows the current batch."""


validation_follows: Callable[[_TrainingEpochLoop, Any], bool] = _TrainingEpochLoop._should_check_val_fx
"""Whether validation follows the current batch, of a fetcher."""


training_data: Callable[[_FitLoop], CombinedLoader | None] = attrgetter("_combined_loader")
"""Return the training loaders; ``None`` before they are set up."""
training_source: Callable[[pl.Trainer], Any] = attrgetter("fit_loop._data_source.instance")
"""Return the source of training data: module, datamodule or loaders."""


def is_sequential_loader(loader: CombinedLoader) -> bool:
    """Whether one loader follows the other; otherwise each batch has one of each."""
    return getattr(loader, "_mode", "") == "sequential"


set_sampler_epoch: Callable[[object, int], None] = _set_sampler_epoch
"""Set the epoch by which the sampler of a loader shuffles."""


def stop_restarting(loop: _Loop) -> None:
    """Make a loop, but not those inside it, behave as if it was not loaded."""
    loop._restarting = False


def is_sequential(trainer: pl.Trainer) -> bool:
    """Whether the running evaluation reads one loader after the other."""
    return bool(getattr(trainer._active_loop, "_is_sequential", True))  # that of prediction always does


blocked_sync: Callable[..., AbstractContextManager[None]] = _block_parallel_sync_behavior
"""Prevent gradient reduction in a backward, if ``block``."""


def call_hook(trainer: pl.Trainer, name: str) -> None:
    """Call a hook of all callbacks, and then of the module."""
    call._call_callback_hooks(trainer, name)
    call._call_lightning_module_hook(trainer, name)


ResultCollection = _ResultCollection
Metadata = _Metadata
default_dtype: Callable[[], torch.dtype] = _get_default_dtype  # the dtype of logged values
running_results: Callable[[pl.Trainer], ResultCollection | None] = attrgetter("_results")
"""Return the values that the running loop has logged; ``None`` without a loop that logs."""
logs_are_due: Callable[[pl.Trainer], bool] = attrgetter("_logger_connector.should_update_logs")
"""Whether loggers get the values of this step."""


@contextmanager
def logging_from(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Make ``module.log`` behave as if called in ``hook``."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


def runs_in_hook(module: pl.LightningModule, hook: str) -> bool:
    """Whether ``hook`` of ``module`` is running."""
    return module._current_fx_name == hook


ScriptLauncher = _SubprocessScriptLauncher
MockOptimizer = _MockOptimizer


class PlainStrategy(ParallelStrategy):
    """Lightning's strategy for several processes, with public names for its private ones."""

    def make_launcher(self) -> ScriptLauncher | None:
        """Return what starts the other processes; ``None`` if they run already."""
        return None

    def choose_precision(self, plugin: Precision) -> Precision:
        """Return the precision plugin to use in place of ``plugin``."""
        return plugin

    def sync_layers(self, model: nn.Module) -> nn.Module:
        """Replace the layers that use the statistics of all ranks (``sync_batchnorm``)."""
        return model if self._layer_sync is None else self._layer_sync.apply(model)

    def reset_optimizers(self) -> None:
        """Forget the optimizers and schedulers of an earlier run."""
        self._reset_optimizers_and_schedulers()

    def run_in_forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module, by name, inside the forward of the model."""
        assert self.model is not None
        assert self.lightning_module is not None
        attributes = vars(self.lightning_module)
        before = {"forward": attributes["forward"]} if "forward" in attributes else {}
        try:
            return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)
        finally:  # Lightning leaves its redirection there if a hook before the forward fails, otherwise the method
            attributes.pop("forward", None)
            attributes.update(before)

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = None if precision_plugin is None else self.choose_precision(precision_plugin)

    @override
    def _configure_launcher(self) -> None:
        launcher = self.make_launcher()
        if launcher is not None:
            self._launcher = launcher


make_script_launcher: Callable[[ClusterEnvironment, int, int], ScriptLauncher] = _SubprocessScriptLauncher
"""Return a launcher that starts the script again for each other device of this node."""


reduce_over_ranks: Callable[[Tensor, Any, Any], Tensor] = _sync_ddp_if_available
"""Reduce a tensor over connected ranks, if any, by an operation."""
ddp_arguments: Callable[[DDPStrategy], dict[str, Any]] = attrgetter("_ddp_kwargs")
"""Return the arguments of DDP, without the module."""


def has_ddp_hook(strategy: DDPStrategy) -> bool:
    """Whether a communication hook reduces the gradients."""
    return strategy._ddp_comm_hook is not None


_OTHERS = attrgetter(
    *("_ddp_comm_hook", "_start_method", "_process_group_backend", "_timeout", "_model_averaging_period"),
    *("cluster_environment", "_checkpoint_io", "_precision_plugin"),
)


def is_plain_ddp(strategy: object) -> bool:
    """Whether a strategy is DDP with no other arguments than those of ``DistributedDataParallel``."""
    return type(strategy) is DDPStrategy and _OTHERS(strategy) == _OTHERS(DDPStrategy())


def mesh_sizes(strategy: ModelParallelStrategy) -> dict[str, Any]:
    """Return the numbers of ranks for data and tensor parallelism, as arguments of the strategy."""
    data, tensor = strategy._data_parallel_size, strategy._tensor_parallel_size
    return {"data_parallel_size": data, "tensor_parallel_size": tensor}


saves_folders: Callable[[ModelParallelStrategy], bool] = attrgetter("_save_distributed_checkpoint")
"""Whether each rank writes its shards to a folder."""


def syncs_layers(strategy: Strategy) -> bool:
    """Whether batch norms use the statistics of all ranks."""
    return getattr(strategy, "_layer_sync", None) is not None


def read_timeout(strategy: Strategy) -> timedelta | None:
    """Return how long ranks wait for each other; ``None``: unknown."""
    return getattr(strategy, "_timeout", None)


def call_after_closure(plugin: Precision, module: pl.LightningModule, optimizer: Optimizer) -> None:
    """Call the hooks between backward and step, and clip."""
    plugin._after_closure(module, optimizer)


SWAP_WITH_AVERAGE = WeightAveraging._swap_models.__name__
PUT_AVERAGE = WeightAveraging._copy_average_to_current.__name__


def is_searching_rate(callbacks: Iterable[Callback]) -> bool:
    """Whether a search for the learning rate is running."""
    return any(isinstance(callback, _LRCallback) for callback in callbacks)


last_checkpoints: Callable[[ModelCheckpoint, pl.Trainer], set[str]] = ModelCheckpoint._find_last_checkpoints
"""Return the paths of the files that ``save_last=True`` wrote."""


average_of: Callable[[WeightAveraging], AveragedModel | None] = attrgetter("_average_model")
"""Return the average; ``None`` before the first fit."""


def refuse_callbacks(name: str, trainer: pl.Trainer, reasons: Mapping[str, str]) -> None:
    """Refuse callbacks that ``name`` does not work with; ``reasons``: why, by the name of their class or a base."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        why = next((reasons[kind.__name__] for kind in type(callback).__mro__ if kind.__name__ in reasons), None)
        if why is not None:
            raise MisconfigurationException(
                f"{name} does not work with {type(callback).__name__}, which {why}. Leave one out."
            )


def averaging_callbacks(trainer: pl.Trainer | None) -> list[WeightAveraging]:
    """Return the ``WeightAveraging`` callbacks that have an average."""
    callbacks: list[Callback] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if isinstance(one, WeightAveraging) and average_of(one) is not None]


def read_argument(cli: "LightningCLI", name: str) -> Any:
    """Return a configured argument of the subcommand."""
    return cli._get(cli.config, name)


def method_arguments(cli: "LightningCLI", subcommand: str) -> dict[str, Any]:
    """Return the arguments of the trainer's method of this name."""
    return cli._prepare_subcommand_kwargs(subcommand)
