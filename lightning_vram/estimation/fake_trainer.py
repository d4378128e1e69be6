"""A Trainer for a card that is not there, out of the arguments of the user's own.

What writes files, shows progress or reads values is left out; what takes memory stays. Two steps are enough: the
first makes the state of the optimizer, the second is as all others.
"""

import copy
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateFinder,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from typing_extensions import override

from lightning_vram.memory.estimate.fakes.device_module import CARD
from lightning_vram.private_names.lightning.connectors import log_nothing

NUM_STEPS = 2
_WATCHERS = (Checkpoint, DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar, Timer)
_FINDERS = (BatchSizeFinder, LearningRateFinder)  # run the fit many times before it
TAKES_NO_MEMORY = "takes_no_memory"
"""Attribute of callbacks that only watch, write files or read values: an estimate leaves them out."""
_SET_HERE = (
    *("accelerator", "devices", "num_nodes", "max_epochs", "min_epochs", "max_steps", "min_steps", "max_time"),
    *("logger", "log_every_n_steps", "profiler", "barebones", "fast_dev_run", "overfit_batches", "detect_anomaly"),
    *("enable_checkpointing", "enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"),
    *("limit_train_batches", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch"),
    *("limit_test_batches", "limit_predict_batches", "reload_dataloaders_every_n_epochs", "default_root_dir"),
)
_ENDS = (
    *("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end"),
    *("on_train_end", "on_fit_end", "on_exception", "on_save_checkpoint", "teardown"),
)
_OWN = "lightning_vram."
_NEED_CUDA = (FSDPStrategy, DeepSpeedStrategy)
_NAMES_OF_SUCH = ("deepspeed", "fsdp_cpu_offload")
_STARTS_PROCESSES = re.compile("_(spawn|fork|notebook)")  # of ddp: no process is started here
_ON_ONE_DEVICE = (None, "auto", "single_device")


class FakeAccelerator(Accelerator):
    """Says that the card is there, as often as it is wanted."""

    @override
    def setup_device(self, device: torch.device) -> None: ...

    @override
    def teardown(self) -> None: ...

    @staticmethod
    @override
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    @override
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [CARD] * devices

    @staticmethod
    @override
    def auto_device_count() -> int:
        return 1

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @staticmethod
    @override
    def name() -> str:
        return "cuda"

    @override
    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


class FakeEnvironment(ClusterEnvironment):
    """Says that this is rank 0 of processes that are all there: nobody is to start them, and no job is looked at.

    Args:
        num_ranks: How many there are.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "localhost"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._num_ranks

    @override
    def set_world_size(self, size: int) -> None: ...

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def set_global_rank(self, rank: int) -> None: ...

    @override
    def local_rank(self) -> int:
        return 0

    @override
    def node_rank(self) -> int:
        return 0


def needs_ranks(arguments: Mapping[str, Any]) -> bool:
    """Whether the strategy connects processes, be it one."""
    return arguments.get("strategy") not in _ON_ONE_DEVICE


def make_trainer(
    arguments: Mapping[str, Any],
    device: torch.device,
    num_ranks: int,
    own_callbacks: Sequence[Callback],
    *,
    folder: str,
    with_validation: bool,
) -> pl.Trainer:
    """Make a Trainer that runs :data:`NUM_STEPS` optimizer steps and one batch of validation.

    Args:
        arguments: Of the user's Trainer, with :func:`parts_of` in it copied. The strategy is copied here.
        device: What it runs on.
        num_ranks: How many of them there are.
        own_callbacks: Come after the user's.
        folder: For files that a callback may write.
        with_validation: Whether to validate.

    Raises:
        TypeError: If an argument is none of ``Trainer``.
        ValueError: If the strategy runs on CUDA only.
    """
    _check_names(arguments)
    kept = {name: value for name, value in arguments.items() if name not in _SET_HERE}
    kept |= parts_of(arguments)
    callbacks, plugins = kept.pop("callbacks"), kept.pop("plugins")
    strategy = kept.get("strategy")
    if strategy in _ON_ONE_DEVICE:
        kept["strategy"] = SingleDeviceStrategy(device=device) if num_ranks == 1 else "ddp"
    elif isinstance(strategy, _NEED_CUDA) or str(strategy).startswith(_NAMES_OF_SUCH) or strategy == "fsdp":
        raise ValueError(
            f"estimate_memory does not run the strategy {strategy!r}, which takes no device but CUDA's: fsdp_offload "
            "shards the same."
        )
    elif isinstance(strategy, str):
        kept["strategy"] = _STARTS_PROCESSES.sub("", strategy)
    kept["strategy"] = copy.deepcopy(kept["strategy"])  # a Trainer writes to it
    return pl.Trainer(
        **kept,
        accelerator=FakeAccelerator() if device == CARD else "cpu",
        devices=num_ranks,
        callbacks=[*callbacks, *own_callbacks],
        plugins=[*plugins, FakeEnvironment(num_ranks)],
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1 if with_validation else 0,
    )


def add_silent_logger(trainer: pl.Trainer) -> None:
    """Let steps have a ``self.logger``, which drops whatever they hand to it.

    Args:
        trainer: That has begun to train: before, it would warn of how often it logs.
    """
    log_nothing(trainer)
    trainer.loggers = [_SilentLogger(str(trainer.default_root_dir))]


class _SilentLogger(DummyLogger):
    """Drops what it gets.

    Args:
        folder: Where it would write.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    @override
    def save_dir(self) -> str:
        return self._folder


def parts_of(arguments: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return callbacks and plugins of the user's Trainer that a step has need of.

    To be copied together with the module: some of them hold it, or parts of it.
    """
    callbacks, plugins = (as_list(arguments.get(name)) for name in ("callbacks", "plugins"))
    return {
        "callbacks": [callback for callback in callbacks if not _is_watcher(callback)],
        "plugins": [plugin for plugin in plugins if not isinstance(plugin, ClusterEnvironment)],
    }


def as_list(value: Any) -> list[Any]:
    """Return callbacks or plugins as a Trainer takes them: one, several or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_watcher(callback: Callback) -> bool:
    return isinstance(callback, (*_WATCHERS, *_FINDERS)) or getattr(callback, TAKES_NO_MEMORY, False)


def _check_names(arguments: Mapping[str, Any]) -> None:
    known = inspect.signature(pl.Trainer.__init__).parameters
    for name in arguments:
        if name not in known:
            raise TypeError(f"estimate_memory(trainer) takes the arguments of Trainer, got {name!r}, which it has not.")


def silence_ends(module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
    """Leave out hooks that come after steps, of the user's code and Lightning's. Those of this package undo things.

    Args:
        module: A copy.
        callbacks: Copies.
    """
    for part in (module, *callbacks):
        if not type(part).__module__.startswith(_OWN):
            vars(part).update(dict.fromkeys((name for name in _ENDS if hasattr(part, name)), _do_nothing))


class StayOnCard(Callback):
    """Leave out that Lightning moves all back to the host once a run is over, tensor by tensor: a fifth of the work.

    Strategies and plugins of this package end in their own way, some with copies that belong on the host.
    """

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parts = trainer.strategy, trainer.precision_plugin
        if not any(type(part).__module__.startswith(_OWN) for part in parts):
            vars(pl_module)["cpu"] = lambda: pl_module
            trainer.strategy.optimizers = []


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a hook."""
