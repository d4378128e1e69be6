"""Fits that go on from any checkpoint with the sample and the random numbers that would have come next."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from support.requeue_runs import FakeSlurm, Noting, Run, assert_went_on, fit
from torch.utils.data import DataLoader, IterableDataset

from lightning_vram.callbacks.slurm_requeue.callback import SlurmRequeue

NUM_BATCHES = 5
AGAIN = "^SlurmRequeue cannot resume at the next sample: "


@pytest.fixture(autouse=True)
def no_job(slurm: FakeSlurm) -> None:
    slurm.leave()


class Save(pl.Callback):
    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if len(pl_module.seen) == self.after:
            trainer.save_checkpoint(self.path)


class Long(Noting):
    def __init__(self) -> None:
        super().__init__(NUM_BATCHES)


class FromNowhere(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(NUM_BATCHES * 2.0).view(-1, 1).expand(-1, 4))


class Iterable(Long):
    def train_dataloader(self) -> Any:
        return DataLoader(FromNowhere(), batch_size=2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch], batch_idx)


class Counting:
    """A loader that has a state, which Lightning saves."""

    num_done = 0

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        while self.num_done < len(self.batches):
            self.num_done += 1
            yield self.batches[self.num_done - 1]
        self.num_done = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_done": self.num_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_done = state["num_done"]


class Stateful(Iterable):
    def train_dataloader(self) -> Any:
        return Counting(list(super().train_dataloader()))


def save(make: type[Noting], folder: Path, after: int, *callbacks: pl.Callback) -> Run:
    saver = Save(folder / "some.ckpt", after)
    return fit(make, folder, saver, *callbacks, max_epochs=1, limit_val_batches=0)


def resume(make: type[Noting], folder: Path, *callbacks: pl.Callback) -> Run:
    return fit(make, folder, *callbacks, ckpt_path=folder / "some.ckpt", max_epochs=1, limit_val_batches=0)


def test_any_checkpoint_goes_on_with_the_next_sample(tmp_path):
    after = 3
    expected = save(Long, tmp_path, after, SlurmRequeue())
    resumed = resume(Long, tmp_path, SlurmRequeue())
    first = Run(Long(), expected.trainer, expected.rows[:after])
    first.module.seen = expected.module.seen[:after]
    assert_went_on(expected, first, resumed)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_what_is_seen_again_is_said(tmp_path):
    expected = save(Iterable, tmp_path, 2, SlurmRequeue())
    message = (
        "SlurmRequeue cannot resume at the next sample: its dataset is an IterableDataset, which has no positions. The "
        "first 2 batches of this epoch are repeated, the last ones are skipped."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        resumed = resume(Iterable, tmp_path, SlurmRequeue())
    begin = [samples for _, _, samples in resumed.module.seen][:3]
    assert begin == [samples for _, _, samples in expected.module.seen[:3]]


def test_a_loader_with_a_state_of_its_own_is_left_to_lightning(tmp_path):
    expected = save(Stateful, tmp_path, 2, SlurmRequeue())
    resumed = resume(Stateful, tmp_path, SlurmRequeue())
    assert resumed.module.seen == expected.module.seen[2:]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_a_checkpoint_of_another_number_of_loaders_says_so(tmp_path):
    class Two(Long):
        def train_dataloader(self) -> Any:
            return [super().train_dataloader(), super().train_dataloader()]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    save(Long, tmp_path, 2, SlurmRequeue())
    message = (
        "SlurmRequeue cannot resume at the next sample: the loaders or the number of ranks differ from those "
        "of the checkpoint. The first 2 batches of this epoch are repeated, the last ones are skipped."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        resume(Two, tmp_path, SlurmRequeue())


class Unequal(Long):
    """Two loaders, of which the shorter one ends first; notes random numbers, too."""

    mode = "max_size_cycle"

    def train_dataloader(self) -> Any:
        loaders = [self.make_loader(num, **self.arguments()) for num in (2, NUM_BATCHES)]
        return CombinedLoader({"short": loaders[0], "longs": [loaders[1]]}, self.mode)

    def arguments(self) -> dict[str, Any]:
        return {"shuffle": True}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        parts = [part[0] for part in (batch["short"], batch["longs"][0]) if part is not None]
        self.seen.append((batch_idx, [part.tolist() for part in parts], torch.rand(()).item()))
        return sum(self.net(part).square().mean() for part in parts)


def resume_and_compare(make: type[Unequal], folder: Path, after: int) -> bool:
    lasts = {"max_epochs": 2, "limit_val_batches": 0}
    expected = fit(make, folder, Save(folder / "some.ckpt", after), SlurmRequeue(), **lasts).module.seen
    resumed = fit(make, folder, SlurmRequeue(), ckpt_path=folder / "some.ckpt", **lasts).module.seen
    assert len(expected) == 2 * NUM_BATCHES
    return resumed == expected[after:]


@pytest.mark.parametrize(("mode", "after"), [("max_size_cycle", 3), ("max_size_cycle", 6), ("max_size", 3)])
def test_a_loader_that_ends_before_a_longer_one_goes_on_where_it_was(mode, after, tmp_path):
    make = type("Made", (Unequal,), {"mode": mode})
    assert resume_and_compare(make, tmp_path, after)


def test_of_loaders_whose_common_length_is_unknown_all_begin_anew(tmp_path):
    class Beside(Unequal):
        def train_dataloader(self) -> Any:
            short = self.make_loader(2, shuffle=True)
            return CombinedLoader({"short": short, "longs": [Iterable.train_dataloader(self)]}, self.mode)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step({"short": batch["short"], "longs": [batch["longs"]]}, batch_idx)

    with pytest.warns(UserWarning, match=AGAIN) as warned:
        resume_and_compare(Beside, tmp_path, 2)
    said = {str(warning.message).split(": ")[1] for warning in warned if "SlurmRequeue" in str(warning.message)}
    assert {reason.partition(". The first 2 batches")[0] for reason in said} == {
        "its position is not in the checkpoint, because another loader has no length",
        "its dataset is an IterableDataset, which has no positions",
    }


def test_loaders_that_share_a_generator_are_warned_of(tmp_path):
    class Sharing(Unequal):
        def train_dataloader(self) -> Any:
            self.shared = torch.Generator().manual_seed(3)
            return super().train_dataloader()

        def arguments(self) -> dict[str, Any]:
            return {"shuffle": True, "generator": self.shared}

    with pytest.warns(
        UserWarning,
        match=r"^SlurmRequeue cannot restore a generator that several .* its own torch\.Generator\.$",
    ):
        resume_and_compare(Sharing, tmp_path, 2)
