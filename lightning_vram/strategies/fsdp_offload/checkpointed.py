"""Checkpoints of a sharded run, and its averages of weights."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.private_names.lightning.connectors import find_trainer
from lightning_vram.strategies.fsdp_offload.averages import RunAverages
from lightning_vram.strategies.fsdp_offload.checkpoint_store import CheckpointStore
from lightning_vram.strategies.fsdp_offload.connected import ConnectedStrategy
from lightning_vram.techniques.sharded_checkpoints import (
    gather_module_state,
    gather_optimizer_state,
    sharded_module_state,
    sharded_optimizer_state,
)


class CheckpointedStrategy(ConnectedStrategy):
    """A strategy with a sharded module, and full or sharded checkpoints."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._store: CheckpointStore | None = None
        self._to_load: tuple[Mapping[str, Any], bool] | None = None
        self._averages = RunAverages()

    @abstractmethod
    def _finish_steps(self) -> None:
        """Wait for pending optimizer steps."""

    @abstractmethod
    def _rest_shards(self) -> None:
        """Free memory in which shards were read."""

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
        self._rest_shards()
        return state

    def _gather_state(self, module: nn.Module) -> dict[str, Any]:
        with self._named("gathering a checkpoint"):
            is_sharded = self.arguments.state_dict_type == "sharded"
            return sharded_module_state(module) if is_sharded else gather_module_state(module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.lightning_module is not None
        self._finish_steps()
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        with self._named("gathering a checkpoint"):
            if self.arguments.state_dict_type == "sharded":
                return sharded_optimizer_state(self.lightning_module, optimizer)
            return gather_optimizer_state(optimizer)

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
            # before the first run there is nothing to overlap with
            store = self._store or self._make_store(asynchronous=False)
            store.save(checkpoint, filepath)
            if not self._is_running:  # the next run may resume from it
                store.wait()

    @property
    def _is_running(self) -> bool:
        module = self.lightning_module
        trainer = find_trainer(module) if module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.RUNNING

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self._store is not None
        with self._named("loading a checkpoint"):
            return self._store.open(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning calls this before the setup, as for one device: a later call would lose the user's weights_only.
        self._to_load = checkpoint, strict
        self._averages.expect_checkpoint(self.lightning_module)

    def _load_module(self, module: nn.Module) -> None:
        to_load, self._to_load = self._to_load, None
        if to_load is not None:
            assert self._store is not None
            self._finish_steps()
            with self._named("loading a checkpoint"):
                self._averages.load(self._store, to_load[0], module, strict=to_load[1])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._store is not None
        assert self.lightning_module is not None
        self._finish_steps()
        with self._named("loading a checkpoint"):
            self._store.load_optimizers(checkpoint, self.lightning_module, self.optimizers)

    def wait_for_checkpoints(self) -> None:
        """Wait for ``async_save``."""
        if self._store is not None:
            self._store.wait()

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        assert self._store is not None
        self._store.remove(filepath)

    def _make_store(self, *, asynchronous: bool) -> CheckpointStore:
        arguments = self.arguments
        return CheckpointStore(
            sharded=arguments.state_dict_type == "sharded",
            asynchronous=asynchronous,
            is_main=self.is_global_zero,
            timeout=arguments.timeout,
            verify=arguments.verify,
        )
