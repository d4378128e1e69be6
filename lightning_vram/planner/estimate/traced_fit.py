"""Two steps of ``Trainer.fit`` on tensors without memory, every byte noted."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from typing_extensions import override

from lightning_vram.memory.estimate.fake_device import CARD, HOST, fake_device
from lightning_vram.memory.estimate.fake_tensors import FakeTensors, like_fresh
from lightning_vram.memory.estimate.fake_ranks import fake_ranks
from lightning_vram.memory.tracking.timeline import MemoryTimeline
from lightning_vram.memory.tracking.tracker import MemoryTracker, track_memory
from lightning_vram.planner.estimate.fake_trainer import NUM_STEPS, make_trainer, needs_ranks
from lightning_vram.private_names.torch.dispatch import without_modes
from lightning_vram.private_names.torch.trees import tree_map

FIRST_STEP, STEP, VALIDATION = "first step", "step", "validation"


@dataclass(frozen=True)
class TracedFit:
    """What two steps and a validation did.

    Args:
        timeline: All of it.
        spans: First event and the one after the last, by stage.
    """

    timeline: MemoryTimeline
    spans: Mapping[str, tuple[int, int]]

    def stage(self, name: str) -> MemoryTimeline:
        """The timeline of one stage, with what it found."""
        return self.timeline.between(*self.spans[name])


def trace_fit(
    module: pl.LightningModule, batch: Any, trainer_arguments: Mapping[str, Any], *, card_bytes: int | None,
    num_ranks: int = 1, with_validation: bool,
) -> TracedFit:
    """Run two optimizer steps, and one batch of validation, on fake tensors.

    Args:
        module: Is copied, with fakes for its parameters and buffers: it is not touched.
        batch: Any nest of tensors, of which shapes and types count.
        trainer_arguments: Of the user's Trainer.
        card_bytes: What the card has; ``None`` runs on the host.
        with_validation: Whether to validate.

    Raises:
        Exception: What the step raises, among it that of an operator that needs values.
    """
    trackers: list[MemoryTracker] = []
    device = HOST if card_bytes is None else CARD
    with fake_device(
        num_bytes=card_bytes or 0, allocated_bytes=lambda: trackers[0].live_bytes(CARD) if trackers else 0
    ) as mode, fake_ranks(num_ranks) if num_ranks > 1 or needs_ranks(trainer_arguments) else nullcontext():
        fakes = FakeTensors(mode, HOST)
        copied = fakes.copy_of(module, [*module.parameters(), *module.buffers()])
        template = fakes.batch(batch)
        make = partial(like_fresh, template, mode)
        return _fit(copied, make, trainer_arguments, device, trackers, num_ranks, with_validation=with_validation)


def trace_real_fit(
    module: pl.LightningModule, batch: Any, trainer_arguments: Mapping[str, Any], *, with_validation: bool
) -> TracedFit:
    """The same on real tensors, on the host. The module is copied, weights and all."""
    make = partial(tree_map, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    return _fit(copy.deepcopy(module), make, trainer_arguments, HOST, [], 1, with_validation=with_validation)


def _fit(
    module: pl.LightningModule, make_batch: Callable[[], Any], trainer_arguments: Mapping[str, Any],
    device: torch.device, trackers: list[MemoryTracker], num_ranks: int, *, with_validation: bool,
) -> TracedFit:
    with track_memory(module) as tracker:
        trackers.append(tracker)
        marks = _Marks(tracker)
        trainer = make_trainer(trainer_arguments, device, num_ranks, [marks], with_validation=with_validation)
        _connect_past_modes(trainer.strategy)
        num_batches = NUM_STEPS * max(1, int(trainer.accumulate_grad_batches))
        loader = _Batches(make_batch, num_batches)
        trainer.fit(module, loader, _Batches(make_batch, 1) if with_validation else None)
    return TracedFit(tracker.timeline.on(str(device)), marks.spans(num_batches))


def _connect_past_modes(strategy: Strategy) -> None:
    """Meshes of ranks are tensors whose values count."""
    connect = strategy.setup_environment

    def run() -> None:
        with without_modes():
            connect()

    strategy.setup_environment = run  # type: ignore[method-assign]


class _Batches:
    """A loader that makes each batch when it is asked for."""

    def __init__(self, make: Callable[[], Any], num_batches: int) -> None:
        self.make = make
        self._num_batches = num_batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num_batches):
            yield self.make()

    def __len__(self) -> int:
        return self._num_batches


class _Marks(Callback):
    """Notes at which event the stages begin and end."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker
        self._starts: list[int] = []
        self._end_of_training = self._end_of_validation = 0

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        self._tracker.label_inputs(batch)
        self._starts.append(self._tracker.num_events)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._end_of_training = self._tracker.num_events

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *_: Any
    ) -> None:
        self._tracker.label_inputs(batch)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_of_validation = self._tracker.num_events

    def spans(self, num_batches: int) -> dict[str, tuple[int, int]]:
        second = self._starts[num_batches // NUM_STEPS]
        spans = {FIRST_STEP: (0, second), STEP: (second, self._end_of_training)}
        if self._end_of_validation:
            spans[VALIDATION] = (self._end_of_training, self._end_of_validation)
        return spans
