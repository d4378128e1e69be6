"""One torchmetrics metric whose list states are on the host between steps and in ``compute``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.private_names.lightning.metrics import (
    APPLY,
    SYNC_STATES,
    converts_dtype,
    default_states,
    placed_on,
)
from lightning_vram.techniques.metric_offload import copy_to, host_group, keep_on_host

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
        self._patches = [Shadow(metric, name, partial(partial, run)) for name, run in replaced.items()]

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
