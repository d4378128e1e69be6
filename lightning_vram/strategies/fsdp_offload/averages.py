"""Averages of weights in a sharded run."""

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
_REST = "averaging_state"  # key of other values of an average in a checkpoint


class RunAverages:
    """Averages of ``WeightAveraging`` callbacks, which copy the module before it is sharded."""

    def __init__(self) -> None:
        self._averages: list[HostAverage] = []
        self._patches: list[Shadow] = []

    @staticmethod
    def copies_of(module: Any) -> list[nn.Module]:
        """Return the whole copies of the module."""
        return [average.module for _, average in list_averages(find_trainer(module), module)]

    def shard(self, module: Any, sharding: FullSharding, gather: Any) -> None:
        """Shard the averages; ``gather`` makes the state of a sharded module for a checkpoint."""
        trainer = find_trainer(module)
        is_copy = trainer is not None and trainer.state.fn == TrainerFn.FITTING  # the callback has just copied it
        for _, average in list_averages(trainer, module):
            self._averages.append(HostAverage(average, module, sharding, is_copy=is_copy, gather=gather))

    def attach(self, optimizers: HostOptimizers) -> None:
        """Update the averages in the thread of the optimizers."""
        for average in self._averages:
            average.optimizers = optimizers

    def expect_checkpoint(self, module: pl.LightningModule | None) -> None:
        """Keep callbacks from loading whole tensors: :meth:`load` does it."""
        self._remove_patches()
        for callback in averaging_callbacks(None if module is None else find_trainer(module)):
            if type(callback).on_load_checkpoint is WeightAveraging.on_load_checkpoint:
                self._patches.append(Shadow(callback, "on_load_checkpoint", instead(lambda *_: None)))

    def load(self, store: CheckpointStore, checkpoint: Mapping[str, Any], module: nn.Module, *, strict: bool) -> None:
        """Load the module and the averages, as the callback does. A collective.

        From a checkpoint without averages they start from its weights.
        """
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
        """Unshard the averages; ``make_whole``: gather them (a collective)."""
        self._remove_patches()
        while self._averages:
            self._averages.pop().remove(make_whole=make_whole)

    def _remove_patches(self) -> None:
        while self._patches:
            self._patches.pop().remove()
