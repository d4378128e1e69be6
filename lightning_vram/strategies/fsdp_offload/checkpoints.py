"""Checkpoints of a sharded run, and its averages of weights."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.optimizers.averages import HostAverage
from lightning_vram.optimizers.moment_forms import is_elementwise
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.private_names.lightning import averaging_callbacks
from lightning_vram.strategies.fsdp_offload.base import BaseStrategy
from lightning_vram.techniques.sharded_checkpoints import MODULE_STATES, CheckpointStore

_AVERAGE, _CURRENT = MODULE_STATES
_REST = "averaging_state"  # key of other values of an average in a checkpoint


class CheckpointedStrategy(BaseStrategy):
    """A strategy with a sharded module, and full or sharded checkpoints."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._host_optimizers: HostOptimizers | None = None
        self._store: CheckpointStore | None = None
        self._to_load: tuple[Mapping[str, Any], bool] | None = None
        self._averages: list[HostAverage] = []  # of callbacks, which copy the module before it is sharded
        self._callback_patches: list[MethodPatch] = []

    def _finish_steps(self) -> None:
        if self._host_optimizers is not None:
            self._host_optimizers.finish()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._store is None:
            with self._named("setup"):
                self._store = self._make_store(asynchronous=self.arguments.async_save)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._finish_steps()
        state = self._gather_state(self.lightning_module)
        for group in self._sharding.groups if self._sharding is not None else ():
            if group.is_sharded:
                group.steps.rest()  # frees memory in which shards were read
        return state

    def _gather_state(self, module: nn.Module) -> dict[str, Any]:
        with self._named("gathering a checkpoint"):
            return self._any_store.module_state(module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._finish_steps()
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        with self._named("gathering a checkpoint"):
            return self._any_store.optimizer_state(self.lightning_module, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError("FSDPOffloadStrategy.save_checkpoint(storage_options=...) is not supported: leave it out.")
        if self._store is None and self.world_size > 1:
            raise MisconfigurationException(
                f"Trainer.save_checkpoint: the {self.world_size} processes connect in the first fit, validate, test or "
                "predict. Save after that, or save module.state_dict()."
            )
        with self._named("saving a checkpoint"):
            self._any_store.save(checkpoint, filepath)
            trainer = self._trainer
            if trainer is None or trainer.state.status != TrainerStatus.RUNNING:  # the next run may resume from it
                self.wait_for_checkpoints()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        with self._named("loading a checkpoint"):
            return self._any_store.open(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning calls this before the setup, as for one device: a later call would lose the user's weights_only.
        self._to_load = checkpoint, strict
        for callback in averaging_callbacks(self._trainer):
            if type(callback).on_load_checkpoint is WeightAveraging.on_load_checkpoint:  # it would load whole tensors
                patch = MethodPatch(callback, "on_load_checkpoint", replace_by(lambda *_: None))
                self._callback_patches.append(patch)
        if self._sharding is not None:  # a tuner restores its start
            self._load_module(self._sharding.module)

    def _load_module(self, module: nn.Module) -> None:
        to_load, self._to_load = self._to_load, None
        if to_load is not None:
            self._finish_steps()
            with self._named("loading a checkpoint"):
                self._load_weights(module, to_load[0], strict=to_load[1])

    def _load_weights(self, module: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load module and averages, which start from the weights if the checkpoint has none. A collective."""
        has_average = _REST in checkpoint
        key = _CURRENT if has_average and self._averages else _AVERAGE
        self._any_store.load_module(checkpoint, module, strict=strict, key=key)
        for average in (one.average for one in self._averages):
            self._any_store.load_module(checkpoint, average.module, strict=strict and has_average, key=_AVERAGE)
            if has_average:
                average.load_state_dict(checkpoint[_REST], strict=False)
            else:
                rank_zero_warn("The checkpoint has no averaged weights: WeightAveraging starts from its weights.")

    def _remove_averages(self, *, make_whole: bool) -> None:
        """Unshard the averages; ``make_whole``: gather them (a collective)."""
        while self._callback_patches:
            self._callback_patches.pop().remove()
        while self._averages:
            self._averages.pop().remove(make_whole=make_whole)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        self._finish_steps()
        with self._named("loading a checkpoint"):
            self._any_store.load_optimizers(checkpoint, self.lightning_module, self.optimizers, is_elementwise)

    def wait_for_checkpoints(self) -> None:
        """Wait for ``async_save``."""
        if self._store is not None:
            self._store.wait()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._any_store.remove(filepath)

    @property
    def _any_store(self) -> CheckpointStore:
        """Before the first run one without a thread: there is nothing to overlap with."""
        return self._store or self._make_store(asynchronous=False)

    def _make_store(self, *, asynchronous: bool) -> CheckpointStore:
        arguments = self.arguments
        return CheckpointStore(
            sharded=arguments.state_dict_type == "sharded",
            asynchronous=asynchronous,
            timeout=arguments.timeout,
            verify=arguments.verify,
            remote=self.checkpoint_io,
        )
