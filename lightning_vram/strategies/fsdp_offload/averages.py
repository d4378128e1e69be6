"""Lightning's averages of weights in a sharded run: sharded as the module is, loaded, and made whole again."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.optimizers.on_host import HostAverage, HostOptimizers
from lightning_vram.precision.averages import list_averages
from lightning_vram.private_names.lightning.callbacks import averaging_callbacks
from lightning_vram.private_names.lightning.connectors import find_trainer
from lightning_vram.strategies.fsdp_offload.checkpoint_store import CheckpointStore
from lightning_vram.techniques.sharded_checkpoints import MODULE_STATES
from lightning_vram.techniques.sharding import FullSharding

_AVERAGE, _CURRENT = MODULE_STATES
_REST = "averaging_state"  # key of what else an average has, in a checkpoint


class RunAverages:
    """Those of the trainer's ``WeightAveraging`` callbacks, which copy the module before it is sharded."""

    def __init__(self) -> None:
        self._averages: list[HostAverage] = []
        self._stand_ins: list[Shadow] = []

    @staticmethod
    def copies_of(module: Any) -> list[nn.Module]:
        """Return what the callbacks have copied of the module, whole."""
        return [average.module for _, average in list_averages(find_trainer(module), module)]

    def shard(self, module: Any, sharding: FullSharding, gather: Any) -> None:
        """Shard the averages that there are."""
        trainer = find_trainer(module)
        is_copy = trainer is not None and trainer.state.fn == TrainerFn.FITTING  # the callback has just made it
        for _, average in list_averages(trainer, module):
            self._averages.append(HostAverage(average, module, sharding, is_copy=is_copy, gather=gather))

    def attach(self, optimizers: HostOptimizers) -> None:
        """Have the averages moved by who steps the optimizers."""
        for average in self._averages:
            average.optimizers = optimizers

    def expect_checkpoint(self, module: pl.LightningModule | None) -> None:
        """Have the callbacks, which would load whole tensors, not load what comes next: :meth:`load` does."""
        self._remove_stand_ins()
        for callback in averaging_callbacks(None if module is None else find_trainer(module)):
            if type(callback).on_load_checkpoint is WeightAveraging.on_load_checkpoint:
                self._stand_ins.append(Shadow(callback, "on_load_checkpoint", instead(lambda *_: None)))

    def load(self, store: CheckpointStore, checkpoint: Mapping[str, Any], module: nn.Module, *, strict: bool) -> None:
        """Load the module and the averages, as the callback does. A collective."""
        has_average = store.has_state(checkpoint, _CURRENT) and _REST in checkpoint
        key = _CURRENT if has_average and self._averages else _AVERAGE
        store.load_module(checkpoint, module, strict=strict, key=key)
        for average in self._averages:
            store.load_module(checkpoint, average.average.module, strict=strict and has_average, key=_AVERAGE)
            if has_average:
                average.average.load_state_dict(checkpoint[_REST], strict=False)
            else:
                rank_zero_warn("The checkpoint has no averaged weights: WeightAveraging starts from its weights.")

    def remove(self, *, make_whole: bool) -> None:
        """Let the averages be plain modules again."""
        self._remove_stand_ins()
        while self._averages:
            self._averages.pop().remove(make_whole=make_whole)

    def _remove_stand_ins(self) -> None:
        while self._stand_ins:
            self._stand_ins.pop().remove()
