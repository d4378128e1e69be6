"""One torchmetrics metric during one attempt: its state before, and the values of its micro-batches."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_vram.callbacks.micro_batching.shown_values import (
    ShownValue,
    States,
    detach_nest,
    read_states,
    value_of_batch,
)
from lightning_vram.core.rollback.attribute_state import AttributeState
from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.private_names.lightning.metrics import default_states, show_value, shown_value

_NOTES = "_shown_by_micro_batches"

Call = Callable[..., Any]


class WatchedMetric:
    """A metric during one attempt. It works on copies of its tensor states, made where it writes to them."""

    def __init__(self, metric: Metric, num_micro_batches: int) -> None:
        self._metric = metric
        if _NOTES not in vars(metric):  # else another one watches this batch already
            show_value(metric, detach_nest(shown_value(metric)))  # the graph of the last batch would live on
        self._before = AttributeState(metric, max_items=sys.maxsize)  # forward empties lists of any length
        attributes = vars(metric)
        self._originals: dict[str, Tensor] = {
            name: attributes[name] for name in default_states(metric) if isinstance(attributes.get(name), Tensor)
        }
        self._number = 0  # of the micro-batch
        self._share: float = 1.0
        self._shown: list[ShownValue] = []
        self._states: States | None = None
        replaced = {"update": self._update}
        if num_micro_batches > 1:
            replaced |= {"forward": self._forward, "compute": self._compute}
            attributes[_NOTES] = self._shown  # an inner attempt that is dropped restores it with the other attributes
        self._patches = [Shadow(metric, name, partial(partial, run)) for name, run in replaced.items()]

    def start_micro_batch(self, share: float) -> None:
        """Call before each micro-batch."""
        if self._is_last_shown():
            value = self._shown[-1].value
            self._forget_latest(value)
            show_value(self._metric, value)
        else:
            self._forget_latest()
        self._number += 1
        self._share = share

    def restore(self) -> None:
        """Put the metric back into its state at the beginning."""
        self._remove_patches()
        self._before.restore()

    def finish(self) -> None:
        """Keep what was accumulated, and show the value of the batch."""
        self._remove_patches()
        shown = list({one.micro_batch: one for one in self._shown}.values())  # of several calls in each the last
        if len(shown) < 2 or not self._is_last_shown():
            return
        show_value(self._metric, value_of_batch(self._metric, shown))

    def _is_last_shown(self) -> bool:
        cache = shown_value(self._metric)
        return bool(self._shown) and cache is not None and cache is self._shown[-1].original

    def _forget_latest(self, original: Any = None) -> None:
        """Drop the object that the latest call returned, and with it the graph of the micro-batch."""
        if self._shown:
            self._shown[-1] = replace(self._shown[-1], original=original)

    def _remove_patches(self) -> None:
        for patch in reversed(self._patches):
            patch.remove()
        if vars(self._metric).get(_NOTES) is self._shown:
            del vars(self._metric)[_NOTES]

    def _update(self, update: Call, /, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self._metric)
        for name, original in self._originals.items():
            if attributes.get(name) is original:
                with torch.no_grad(), torch.inference_mode(mode=original.is_inference()):
                    attributes[name] = original.clone()
        return update(*args, **kwargs)

    def _forward(self, forward: Call, /, *args: Any, **kwargs: Any) -> Any:
        self._states = None
        value = forward(*args, **kwargs)
        if value is not None and shown_value(self._metric) is value:
            self._forget_latest()
            self._shown.append(ShownValue(self._number, self._share, detach_nest(value), self._states, value))
        return value

    def _compute(self, compute: Call, /, *args: Any, **kwargs: Any) -> Any:
        # forward merges the states into new ones, or drops them
        self._states = {name: detach_nest(state) for name, state in read_states(self._metric).items()}
        return compute(*args, **kwargs)
