"""A Trainer for a GPU you do not have, from the arguments of the user's own.

What writes files, shows progress, sends messages or reads values is left out; what takes memory stays. Two steps are
enough: the first makes the state of the optimizer, the second is as all others.
"""

import copy
import inspect
import logging
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.memory.estimate.fake_device import FAKE_GPU
from lightning_vram.memory.estimate.known_values import replaced
from lightning_vram.private_names.dispatcher import disconnected
from lightning_vram.private_names.lightning import ddp_arguments, log_nothing

_TALKERS = ("lightning.pytorch", "lightning.fabric", "lightning_vram")


@contextmanager
def isolated(*, is_connected: bool = False) -> Iterator[None]:
    """Run a Trainer inside the block that leaves no trace; ``is_connected``: it sees this process's groups.

    A Trainer turns Ctrl-C into ``SystemExit``, and ignores it from then on: here it stays a ``KeyboardInterrupt``.
    """
    handler = signal.getsignal(signal.SIGINT)
    with ExitStack() as stack:
        random_numbers = isolate_rng()
        random_numbers.__enter__()
        stack.callback(random_numbers.__exit__, None, None, None)  # which restores nothing if it sees an error
        stack.enter_context(warnings.catch_warnings(record=True))  # also what a filter of the user's code lets through
        warnings.simplefilter("ignore")
        for name in _TALKERS:
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        # What is said once in a process is not said here, nor noted as said: the run has yet to say it.
        once = [name for name in dir(logging.Logger) if name.endswith("_once")]  # of transformers, for one
        for owner, names in ((WarningCache, ("warn", "deprecation", "info")), (logging.Logger, once)):
            stack.enter_context(replaced(owner, dict.fromkeys(names, _do_nothing)))
        stack.callback(torch.set_warn_always, torch.is_warn_always_enabled())
        torch.set_warn_always(True)
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        _restore_switches(stack)
        if not is_connected:
            stack.enter_context(disconnected())
        try:
            yield
        except SystemExit as end:
            if not isinstance(end.__context__, KeyboardInterrupt):
                raise
            signal.signal(signal.SIGINT, handler)
            raise end.__context__ from None


def _restore_switches(stack: ExitStack) -> None:
    known = vars(rank_zero_only)
    if "rank" in known:
        stack.callback(known.__setitem__, "rank", known["rank"])
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns)
    stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    stack.callback(torch.set_num_threads, torch.get_num_threads())


NUM_STEPS = 2
_CHANGE_THE_STEP = (
    *(BaseFinetuning, GradientAccumulationScheduler, ModelPruning, StochasticWeightAveraging, WeightAveraging),
)
_OWN, _LIGHTNINGS = "lightning_vram.", "lightning.pytorch.callbacks."
TAKES_NO_MEMORY = "takes_no_memory"  # attribute of callbacks of this package that an estimate leaves out
_NOT_RUN = (
    *("on_train_epoch_end", "on_validation_epoch_end", "on_train_end", "on_fit_end", "on_exception"),
    *("on_save_checkpoint", "teardown", "prepare_data"),  # data are there, or made by the run itself
)
RunCallbacks = Sequence[str | type[Callback]]
_KEPT = (
    *("strategy", "precision", "callbacks", "plugins", "accumulate_grad_batches", "gradient_clip_val"),
    *("gradient_clip_algorithm", "deterministic", "benchmark", "inference_mode", "sync_batchnorm"),
)
_NEED_CUDA = (FSDPStrategy, DeepSpeedStrategy)
_NAMES_OF_SUCH = ("deepspeed", "fsdp_cpu_offload")
_STARTS_PROCESSES = re.compile("_(spawn|fork|notebook)")  # of ddp: no process is started here
ON_ONE_DEVICE = (None, "auto", "single_device")  # all others connect processes, be it one


class FakeAccelerator(CPUAccelerator):
    """Reports as many GPUs as are requested."""

    @override
    def setup_device(self, device: torch.device) -> None: ...

    @staticmethod
    @override
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [FAKE_GPU] * int(devices)

    @staticmethod
    @override
    def name() -> str:
        return "cuda"


class FakeEnvironment(LightningEnvironment):
    """Reports rank 0 of processes that already exist: none is started, and no cluster job is detected."""

    creates_processes_externally = True

    @override
    def global_rank(self) -> int:
        return 0

    local_rank = node_rank = global_rank


def make_trainer(
    arguments: Mapping[str, Any],
    device: torch.device,
    num_ranks: int,
    own_callback: Callback,
    folder: str,
) -> pl.Trainer:
    """Make a Trainer that runs :data:`NUM_STEPS` optimizer steps and one batch of validation."""
    if unknown := arguments.keys() - inspect.signature(pl.Trainer.__init__).parameters.keys():
        raise TypeError(f"estimate_memory(trainer) takes arguments of Trainer, got {min(unknown)!r}, which is not one.")
    kept = {name: value for name, value in arguments.items() if name in _KEPT}
    callbacks, plugins = kept.pop("callbacks"), kept.pop("plugins")
    strategy = kept.get("strategy")
    if strategy in ON_ONE_DEVICE:
        kept["strategy"] = SingleDeviceStrategy(device=device) if num_ranks == 1 else "ddp"
    elif isinstance(strategy, _NEED_CUDA) or str(strategy).startswith(_NAMES_OF_SUCH) or strategy == "fsdp":
        raise ValueError(
            f"estimate_memory cannot run the strategy {strategy!r}, which needs CUDA. Use "
            "strategy='fsdp_offload', which shards alike."
        )
    elif isinstance(strategy, str):
        kept["strategy"] = _STARTS_PROCESSES.sub("", strategy)
    kept["strategy"] = copy.deepcopy(kept["strategy"])  # a Trainer writes to it
    trainer = pl.Trainer(
        **kept,
        accelerator=FakeAccelerator() if device == FAKE_GPU else "cpu",
        devices=num_ranks,
        callbacks=[*callbacks, own_callback],
        plugins=[*plugins, FakeEnvironment()],
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1,
    )
    known = {id(callback) for callback in callbacks}  # others come from entry points of installed packages
    trainer.callbacks = [one for one in trainer.callbacks if id(one) in known or is_run(one)]  # type: ignore[attr-defined]
    return trainer


class FakeReducer:
    """Holds the buckets of DDP's reducer, which is C++ that reads pointers, and wraps nothing.

    DDP joins buckets up to 25 MiB each. With ``gradient_as_bucket_view``, gradients move into them in a backward that
    synchronizes; the next forward makes new ones, while gradients that were not zeroed yet hold the old ones.
    """

    def __init__(self, strategy: DDPStrategy, label: Callable[[Sequence[Tensor]], None]) -> None:
        self._strategy = strategy
        self._label = label
        self._is_blocked = self._has_hooks = self._has_reduced = self._is_rebuilt = False
        strategy.configure_ddp = self._hold_buckets  # type: ignore[method-assign]
        if ddp_arguments(strategy).get("gradient_as_bucket_view"):
            strategy.block_backward_sync = self._block  # type: ignore[method-assign]
            strategy.pre_backward = self._pre_backward  # type: ignore[method-assign]
            strategy.training_step = self._training_step  # type: ignore[method-assign]

    def _hold_buckets(self) -> None:
        module: Any = self._strategy.lightning_module
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buckets: list[Tensor] = []  # old ones go first
        self._buckets = [parameter.new_empty(parameter.shape) for parameter in self._parameters]
        self._label(self._buckets)

    @contextmanager
    def _block(self) -> Iterator[None]:
        before, self._is_blocked = self._is_blocked, True
        try:
            yield
        finally:
            self._is_blocked = before

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        is_fixed = ddp_arguments(self._strategy).get("find_unused_parameters")  # such buckets are never made anew
        if self._has_reduced and not (self._is_rebuilt or self._is_blocked or is_fixed):
            self._is_rebuilt = True
            self._hold_buckets()
        return type(self._strategy).training_step(self._strategy, *args, **kwargs)

    def _pre_backward(self, closure_loss: Tensor) -> None:
        if not self._has_hooks:  # not earlier: features refuse hooks of the user when training starts
            self._has_hooks = True
            for index, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(partial(self._move, index))

    def _move(self, index: int, parameter: nn.Parameter) -> None:
        if not (self._is_blocked or parameter.grad is None or parameter.grad.requires_grad):
            parameter.grad, self._has_reduced = self._buckets[index], True


def add_silent_logger(trainer: pl.Trainer) -> None:
    """Let steps have a ``self.logger``, which drops whatever they hand to it."""
    log_nothing(trainer)
    logger = _SilentLogger()
    logger.save_dir = str(trainer.default_root_dir)
    trainer.loggers = [logger]


class _SilentLogger(DummyLogger):
    save_dir: Any = None  # a property of other loggers


def parts_of(arguments: Mapping[str, Any], run_callbacks: RunCallbacks = ()) -> dict[str, list[Any]]:
    """Return the user's callbacks and plugins that a step needs; copy them with the module, which some of them hold."""
    callbacks, plugins = (as_list(arguments.get(name)) for name in ("callbacks", "plugins"))
    return {
        "callbacks": [callback for callback in callbacks if is_run(callback, run_callbacks)],
        "plugins": [plugin for plugin in plugins if not isinstance(plugin, ClusterEnvironment)],
    }


def is_run(callback: Callback, run_callbacks: RunCallbacks = ()) -> bool:
    """Whether a callback is part of the step: ours and Lightning's that change it, and what derives from them."""
    if isinstance(callback, _CHANGE_THE_STEP) or _is_ours(callback):
        return not getattr(callback, TAKES_NO_MEMORY, False)
    return _is_the_users(callback) and _is_one_of(callback, run_callbacks)


def left_out_note(callbacks: Iterable[Callback], run_callbacks: RunCallbacks) -> list[str]:
    """Name the user's own callbacks that were not run; nothing if there are none."""
    left_out = {type(one).__name__ for one in callbacks if _is_the_users(one) and not is_run(one, run_callbacks)}
    names = ", ".join(sorted(left_out))
    how = "If one of them changes the module or the step, add it to run_callbacks."
    return [f"Callbacks that were not run: {names}. {how}"] if names else []


def check_run_callbacks(name: str, given: Any) -> tuple[str | type[Callback], ...]:
    """Return classes and names of callbacks as a tuple."""
    wanted = tuple(as_list(given))
    for one in wanted:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, Callback)):
            raise TypeError(f"{name} must be classes or names of callbacks, got {one!r}.")
    return wanted


def run_without_ends(
    module: pl.LightningModule, callbacks: Iterable[Callback], given: list[Callback], run_callbacks: RunCallbacks
) -> None:
    """Leave out hooks outside of steps, which read and write files; those of this package undo things, and stay."""
    configure = module.configure_callbacks

    def configure_callbacks() -> list[Callback]:
        configured = as_list(configure())
        given.extend(configured)
        for wanted in run_callbacks:
            if not any(is_run(callback, [wanted]) and _is_one_of(callback, [wanted]) for callback in given):
                name = wanted if isinstance(wanted, str) else wanted.__name__
                there = ", ".join(type(callback).__name__ for callback in given if _is_the_users(callback)) or "none"
                raise ValueError(f"run_callbacks names {name!r}, but the Trainer's own callbacks are: {there}.")
        return _without_ends([callback for callback in configured if is_run(callback, run_callbacks)])

    _without_ends([module, *callbacks])
    vars(module)["configure_callbacks"] = configure_callbacks


def _without_ends(parts: list[Any]) -> list[Any]:
    for part in parts:
        if isinstance(part, pl.LightningModule) or not _is_ours(part):
            vars(part).update(dict.fromkeys((name for name in _NOT_RUN if hasattr(part, name)), _do_nothing))
    return parts


def stay_on_card(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Leave out Lightning's move of everything back to the host after a run, tensor by tensor: a fifth of the work."""
    if not any(type(part).__module__.startswith(_OWN) for part in (trainer.strategy, trainer.precision_plugin)):
        vars(module)["cpu"] = lambda: module
        trainer.strategy.optimizers = []


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a hook."""


def as_list(value: Any) -> list[Any]:
    """Return what a Trainer takes alone, in a list or not at all as a list."""
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _is_ours(callback: Callback) -> bool:
    return any(kind.__module__.startswith(_OWN) for kind in type(callback).__mro__)


def _is_the_users(callback: Callback) -> bool:
    """Whether its class is none of Lightning's, which read values, write files or fit many times, nor of ours."""
    kind = type(callback)
    return not _is_ours(callback) and (kind is LambdaCallback or not kind.__module__.startswith(_LIGHTNINGS))


def _is_one_of(callback: Callback, wanted: RunCallbacks) -> bool:
    kinds = [kind for kind in type(callback).__mro__ if issubclass(kind, Callback)]
    return any(not {kind, kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}.isdisjoint(wanted) for kind in kinds)
