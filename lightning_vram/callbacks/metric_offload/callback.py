"""Keep what metrics collect in host memory.

A metric that needs all samples at once, such as AUROC without thresholds, holds every prediction of the epoch on the
device: memory grows with each batch, and no smaller batch size helps. Only its last ``compute`` needs them, and that
can run on the host. It costs a copy to the host after each update, and a slower ``compute``. Metrics that hold sums of
fixed size stay as they are.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torchmetrics import Metric
from typing_extensions import override

from lightning_vram.callbacks.hook_points import FitTechnique
from lightning_vram.callbacks.metric_offload.offloaded_metric import OffloadedMetric, list_states
from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.metric_offload import GrowingLists


class MetricOffload(FitTechnique):
    """Store the lists of all torchmetrics metrics on the CPU, so that device memory does not grow during evaluation.

    Metrics are found in all submodules, collections and wrappers, also if they are created in ``configure_model`` or
    anew for each epoch. ``compute`` runs on the CPU and returns its value on the device: values are bitwise identical
    to those of a CPU run, while a GPU may round differently. Ranks gather the lists over gloo if their own backend,
    such as NCCL, cannot communicate CPU tensors. Metric state of fixed size stays on the device. After the run metrics
    are restored. Nothing is stored in checkpoints.

    Two habits that still waste memory are reported once per run: calling ``metric(preds, target)``, which copies its
    lists each time, and collecting device outputs in an attribute of the module.

    Raises:
        MisconfigurationException: In ``setup``, if the Trainer is one of ``pytorch_lightning``.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import MetricOffload
        >>> trainer = pl.Trainer(callbacks=[MetricOffload()], logger=False)
    """

    uses_gradients = False  # in its hooks, so that optimizers may step before: see FSDPOffloadStrategy
    _stages = ("fit", "validate", "test", "predict")

    def __init__(self) -> None:
        self._offloaded: dict[int, OffloadedMetric] = {}  # by the identity of the metric, which it keeps alive
        self._collected: GrowingLists | None = None
        self._has_warned_of_calls = self._has_warned_of_outputs = False

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        self._offload(trainer.lightning_module)
        kinds = {type(one.metric).__name__ for one in self._offloaded.values()}
        if not kinds:
            rank_zero_info("MetricOffload has no effect: no metric of the module stores lists.")
        elif trainer.strategy.root_device.type == "cpu":
            rank_zero_info("MetricOffload has no effect: the model is on the CPU, and so are its metrics' lists.")
        else:
            named = ", ".join(sorted(kinds))
            rank_zero_info(f"MetricOffload stores the lists of {len(self._offloaded)} metrics on the CPU: {named}.")

    @override
    def _undo(self) -> None:
        while self._offloaded:
            self._offloaded.popitem()[1].remove()
        vars(self).update(self._between_runs())

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for offloaded in self._offloaded.values():
            offloaded.move_back()  # not after an error: memory may be full, and Lightning moves all to the host
        super().teardown(trainer, pl_module, stage)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self._offload(pl_module)

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0 and dataloader_idx == 0:
            self._offload(pl_module)
            self._collected = GrowingLists(pl_module, trainer.strategy.root_device)

    on_test_batch_start = on_validation_batch_start
    on_predict_batch_start = on_validation_batch_start

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        self._warn_of_calls(pl_module)

    @override
    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        self._warn_of_calls(pl_module)
        self._warn_of_outputs(trainer.strategy.root_device)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | self._between_runs()  # a copy is not part of any run

    def _between_runs(self) -> dict[str, Any]:
        flags = {"_has_warned_of_calls": False, "_has_warned_of_outputs": False}
        return {"_offloaded": {}, "_collected": None, **flags}

    def _offload(self, module: pl.LightningModule) -> None:
        """Offload the metrics that are not yet: users make some anew for each epoch (``MetricTracker``)."""
        # not isinstance: Metric is an abstract class, which answers slowly
        members: Any = [member for member in module.modules() if Metric in type(member).__mro__]
        found = {id(metric): metric for metric in members if list_states(metric)}
        for gone in self._offloaded.keys() - found.keys():
            self._offloaded.pop(gone).remove()
        for identity, metric in found.items():
            if identity not in self._offloaded:
                self._offloaded[identity] = OffloadedMetric(metric)

    def _warn_of_calls(self, module: pl.LightningModule) -> None:
        called = [one.metric for one in self._offloaded.values() if one.is_called]
        if self._has_warned_of_calls or not called:
            return
        self._has_warned_of_calls = True
        names = {id(member): name for name, member in module.named_modules()}
        metrics = ", ".join(f"{names.get(id(metric), 'metric')} ({type(metric).__name__})" for metric in called)
        rank_zero_warn(
            f"MetricOffload: a step calls metrics that store lists: {metrics}. Each call copies the whole list. Write "
            "`metric.update(preds, target)` instead of `metric(preds, target)`, and log the metric itself, "
            "`self.log('name', metric)`, or its value at the end of the epoch."
        )

    def _warn_of_outputs(self, device: torch.device) -> None:
        if self._collected is None or self._has_warned_of_outputs or device.type == "cpu":
            return
        if not (found := self._collected.look()):
            return
        self._has_warned_of_outputs = True
        lists = ", ".join(
            f"`self.{one.name}` ({format_bytes(one.total_bytes)}, {format_bytes(one.growth_bytes)} more with each "
            "batch)"
            for one in found
        )
        rank_zero_warn(
            f"MetricOffload: the module collects tensors on {device} in {lists}. Move them to the CPU, as in "
            f"`self.{found[0].name}.append(output.detach().cpu())`, or let a metric collect them."
        )
