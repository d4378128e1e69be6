"""Keep what metrics collect in host memory.

A metric that needs all samples at once, such as AUROC without thresholds, holds every prediction of the epoch on the
device: memory grows with each batch, and no smaller batch size helps. Only its last ``compute`` needs them, and that
can run on the host. It costs a copy to the host after each update, and a slower ``compute``. Metrics that hold sums of
fixed size stay as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_vram.callbacks.hook_points import FitTechnique, offload_is_useless
from lightning_vram.core.patching import MethodPatch
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.metrics import APPLY, SYNC_STATES, converts_dtype, default_states, placed_on
from lightning_vram.techniques.metric_offload import GrowingLists, copy_to, host_group, keep_on_host

_HOST = torch.device("cpu")

Call = Callable[..., Any]


def list_states(metric: Metric) -> list[str]:
    """Return the names of the states that are lists."""
    return [name for name, default in default_states(metric).items() if isinstance(default, list)]


class OffloadedMetric:
    """A metric whose lists are on the host until :meth:`remove`. Copies and pickles of it are ordinary metrics."""

    # compute_on_cpu=True of torchmetrics moves lists after each update, but ``self.log("auc", self.auc)`` moves the
    # metric to its device at each step, and the lists with it; ranks then gather tensors on the host over NCCL, which
    # fails. What ``compute`` returns is on the metric's device again. The value of a batch (``metric(preds, target)``)
    # is computed on the device, of that batch alone.

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.is_called = False  # whether forward was called
        self._names = list_states(metric)
        self._is_in_forward = False
        self._move(looks_at_all=True)
        replaced: dict[str, Call] = {
            "update": self._update,
            "forward": self._forward,
            "compute": self._compute,
            APPLY: self._apply,
            SYNC_STATES: self._sync,
        }
        for name in ("forward", APPLY, SYNC_STATES):
            if vars(metric).get(name) == MethodType(getattr(type(metric), name), metric):
                del vars(metric)[name]  # a copy of an offloaded metric (MetricTracker) has it on itself
        self._patches = [MethodPatch(metric, name, partial(partial, run)) for name, run in replaced.items()]

    def remove(self) -> None:
        """Leave the metric with its states where they are. Calling it again does nothing."""
        for patch in reversed(self._patches):
            patch.remove()

    def move_back(self) -> None:
        """Move the lists to where the metric is."""
        for items in self._lists().values():
            items[:] = copy_to(self.metric.device, items)

    def _lists(self) -> dict[str, list[Any]]:
        """Those that are lists now: while states of all ranks are in their place, they are one tensor each."""
        states = {name: getattr(self.metric, name) for name in self._names}
        return {name: state for name, state in states.items() if isinstance(state, list)}

    def _move(self, *, looks_at_all: bool = False) -> None:
        for items in self._lists().values():
            keep_on_host(items, looks_at_all=looks_at_all)

    def _update(self, update: Call, /, *args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        if not self._is_in_forward:
            self._move()

    def _forward(self, forward: Call, /, *args: Any, **kwargs: Any) -> Any:
        self.is_called = self._is_in_forward = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_in_forward = False
            self._move()

    def _compute(self, compute: Call, /, *args: Any, **kwargs: Any) -> Any:
        if self._is_in_forward:
            return compute(*args, **kwargs)
        with self._on_host():
            value = compute(*args, **kwargs)
        return copy_to(self.metric.device, value)

    def _sync(self, sync: Call, /, dist_sync_fn: Call | None = None, process_group: Any = None) -> None:
        gather = dist_sync_fn or gather_all_tensors
        if self._is_in_forward:  # states of one batch, on the device (dist_sync_on_step)
            sync(dist_sync_fn=gather, process_group=process_group)
            return
        with self._on_host():
            sync(dist_sync_fn=partial(_gather_on_host, gather), process_group=process_group)

    def _apply(self, apply: Call, /, function: Call, *args: Any, **kwargs: Any) -> Any:
        """``to`` and the like: lists are left out, unless their dtype changes."""
        lists = {} if converts_dtype(self.metric) else self._lists()
        for name in lists:
            setattr(self.metric, name, [])
        try:
            return apply(function, *args, **kwargs)
        finally:
            for name, items in lists.items():
                setattr(self.metric, name, items)

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        """Have the whole metric on the host: what it computes of the lists meets its other states and buffers."""
        metric, device = self.metric, self.metric.device
        self._move(looks_at_all=True)  # loaded or merged states, too
        if device == _HOST:
            yield
            return
        others = {name: getattr(metric, name) for name in default_states(metric) if name not in self._names}
        others |= dict(metric.named_buffers(recurse=False))
        copies = copy_to(_HOST, others)
        for name, state in copies.items():
            setattr(metric, name, state)
        try:
            with placed_on(metric, _HOST):
                yield
        finally:
            for name, state in others.items():
                now = getattr(metric, name)
                setattr(metric, name, state if now is copies[name] else copy_to(device, now))


def _gather_on_host(gather: Call, tensor: Tensor, group: Any = None) -> Any:
    return gather(tensor, group=host_group(group))


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
        self._warned: set[str] = set()  # of what, in this run
        self._is_useless = False  # on the device of this run

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        self._is_useless = offload_is_useless(trainer.strategy.root_device, "MetricOffload has no effect", "Remove it.")
        if self._is_useless:
            return
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
        self._collected, self._warned, self._is_useless = None, set(), False

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
        return vars(self) | {"_offloaded": {}, "_collected": None, "_warned": set()}  # a copy is not part of any run

    def _offload(self, module: pl.LightningModule) -> None:
        """Offload the metrics that are not yet: users make some anew for each epoch (``MetricTracker``)."""
        if self._is_useless:
            return
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
        if "calls" in self._warned or not called:
            return
        self._warned.add("calls")
        names = {id(member): name for name, member in module.named_modules()}
        metrics = ", ".join(f"{names.get(id(metric), 'metric')} ({type(metric).__name__})" for metric in called)
        rank_zero_warn(
            f"MetricOffload: a step calls metrics that store lists: {metrics}. Each call copies the whole list. Write "
            "`metric.update(preds, target)` instead of `metric(preds, target)`, and log the metric itself, "
            "`self.log('name', metric)`, or its value at the end of the epoch."
        )

    def _warn_of_outputs(self, device: torch.device) -> None:
        if self._collected is None or "outputs" in self._warned or device.type == "cpu" or self._is_useless:
            return
        if not (found := self._collected.look()):
            return
        self._warned.add("outputs")
        lists = ", ".join(
            f"`self.{one.name}` ({format_bytes(one.total_bytes)}, {format_bytes(one.growth_bytes)} more with each "
            "batch)"
            for one in found
        )
        rank_zero_warn(
            f"MetricOffload: the module collects tensors on {device} in {lists}. Move them to the CPU, as in "
            f"`self.{found[0].name}.append(output.detach().cpu())`, or let a metric collect them."
        )
