"""Private names of Lightning's strategies, and of what they hold: launchers, precision, optimizers."""

from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

AFTER_CLOSURE = "_after_closure"  # of a precision plugin

ScriptLauncher = _SubprocessScriptLauncher
MockOptimizer = _MockOptimizer


class PlainStrategy(ParallelStrategy):
    """Lightning's strategy of several processes, with public names for what is private there."""

    def make_launcher(self) -> ScriptLauncher | None:
        """Return what starts the other processes; ``None`` where they are there already."""
        return None

    def choose_precision(self, plugin: Precision) -> Precision:
        """Return the precision plugin to use where ``plugin`` is given."""
        return plugin

    def sync_layers(self, model: nn.Module) -> nn.Module:
        """Replace the layers that are to see all ranks (``sync_batchnorm``)."""
        return model if self._layer_sync is None else self._layer_sync.apply(model)

    def reset_optimizers(self) -> None:
        """Forget the optimizers and schedulers of a run before."""
        self._reset_optimizers_and_schedulers()

    def run_in_forward(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Run a step of the module, by its name, within the forward of the model."""
        assert self.model is not None
        assert self.lightning_module is not None
        attributes = vars(self.lightning_module)
        before = {key: attributes[key] for key in ("forward",) if key in attributes}
        try:
            return self._forward_redirection(self.model, self.lightning_module, name, *args, **kwargs)
        finally:  # Lightning leaves its redirection there if a hook before the forward fails, else the method itself
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
"""Make what starts the script once more for each other device of this node."""


def reduce_over_ranks(tensor: Tensor, group: Any, reduce_op: Any) -> Tensor:
    """Reduce a tensor over the ranks that are connected; nothing if none are."""
    return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)


ddp_arguments: Callable[[DDPStrategy], dict[str, Any]] = attrgetter("_ddp_kwargs")
"""Return what DDP is made with, besides the module."""


def mesh_sizes(strategy: ModelParallelStrategy) -> dict[str, Any]:
    """Return over how many ranks data and layers are split, as arguments of the strategy."""
    return {
        "data_parallel_size": strategy._data_parallel_size,
        "tensor_parallel_size": strategy._tensor_parallel_size,
    }


saves_folders: Callable[[ModelParallelStrategy], bool] = attrgetter("_save_distributed_checkpoint")
"""Whether each rank writes its shards to a folder."""


def syncs_layers(strategy: Strategy) -> bool:
    """Whether batch norms are to see all ranks."""
    return getattr(strategy, "_layer_sync", None) is not None


def read_timeout(strategy: Strategy) -> timedelta | None:
    """Return how long ranks wait for each other; ``None``: unknown."""
    timeout: timedelta | None = getattr(strategy, "_timeout", None)
    return timeout


def call_after_closure(plugin: Precision, module: pl.LightningModule, optimizer: Optimizer) -> None:
    """Call hooks, and clip, as between backward and step."""
    plugin._after_closure(module, optimizer)
