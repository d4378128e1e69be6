"""Cyclic garbage goes at the same steps on all ranks, however much each has of it, and however long its loaders are."""

import gc
import json
import weakref
from typing import Any

import lightning.pytorch as pl
import pytest
from support.helpers import BATCH_SIZE, LitTiny, TinyGPT
from torch.utils.data import DataLoader

from lightning_vram.callbacks.early_release import EarlyRelease

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning, on small data
]
NUM_CYCLES = (2, 20_000)  # of each rank in each step: the second's make the collector run


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.itself = self


class LitGarbage(LitTiny):
    """Ranks differ in the cycles of each step, and in the lengths of their epochs and of their validations."""

    def __init__(self) -> None:
        super().__init__(TinyGPT())  # no buffers: DDP would broadcast them in each validation step
        self.collected_at: set[int] = set()
        self.seen: list[weakref.ref] = []

    def training_step(self, batch, batch_idx):
        cycles = [Cycle() for _ in range(NUM_CYCLES[self.global_rank])]
        self.seen.append(weakref.ref(cycles[0], self.note_collected))
        return super().training_step(batch, batch_idx)

    def note_collected(self, _):
        if self.trainer.training:  # a validation collects as ever
            self.collected_at.add(self.global_step)

    def train_dataloader(self):
        return DataLoader(self.net.samples((3 + self.global_rank) * BATCH_SIZE), batch_size=BATCH_SIZE)

    def val_dataloader(self):
        return DataLoader(self.net.samples((1 + 4 * self.global_rank) * BATCH_SIZE), batch_size=BATCH_SIZE)


class Collections(pl.Callback):
    """Notes after which steps the collector has run in training, and writes it to a file of each rank."""

    def __init__(self, folder: Any) -> None:
        self.folder = folder
        self.steps: list[int] = []

    def on_train_start(self, trainer, module):
        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start" and trainer.training:
                self.steps.append(trainer.global_step)

        self.note = note
        gc.callbacks.append(note)

    def on_train_end(self, trainer, module):
        gc.callbacks.remove(self.note)
        found = {"steps": self.steps, "collected_at": sorted(module.collected_at)}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def test_garbage_is_collected_at_the_same_steps_on_both_ranks(make_trainer, tmp_path):
    make_trainer(
        callbacks=[EarlyRelease(collect_every_n_steps=3), Collections(tmp_path)],
        strategy="ddp_fork",
        devices=2,
        use_distributed_sampler=False,
        max_epochs=-1,
        max_steps=8,
    ).fit(LitGarbage())
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {"steps": [3, 6], "collected_at": [3, 6]}
