"""The first batches that a run will see, read beside it."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_vram.estimation.batches import read_first_batches


def read(loaders: object, most: int = 8, limit: float = 1.0) -> list:
    """As of a Trainer that was given ``loaders``."""
    source = SimpleNamespace(instance=loaders)
    trainer = SimpleNamespace(limit_train_batches=limit, fit_loop=SimpleNamespace(_data_source=source))
    return read_first_batches(trainer, None, most)[0]


class Lines(IterableDataset):
    """Goes on where it was left, as a file does."""

    def __init__(self, num_lines: int) -> None:
        self.place, self.num_lines = 0, num_lines

    def __iter__(self) -> Iterator[int]:
        while self.place < self.num_lines:
            yield self.place
            self.place += 1


def in_lists(num_samples: int, size: int | None = 2) -> DataLoader:
    return DataLoader(range(num_samples), batch_size=size, collate_fn=list if size else int)


def test_as_many_as_there_are_and_no_more_than_asked_for_or_the_run_takes():
    assert read(in_lists(5)) == [[0, 1], [2, 3], [4]]
    assert read(in_lists(5), most=2) == [[0, 1], [2, 3]]
    assert read(in_lists(5), limit=1) == [[0, 1]]
    assert read(in_lists(3, None)) == [0, 1, 2]


def test_a_loader_that_stacks_samples_is_read_once():
    (batch,) = read(DataLoader(range(6), batch_size=2))
    assert batch.tolist() == [0, 1]
    assert len(read(DataLoader(range(6), batch_size=1))) == 6  # one sample may be longer than another


@pytest.mark.parametrize("size", [2, None])
def test_what_goes_on_where_it_was_left_is_read_from_a_copy(size):
    lines = Lines(5)
    batches = read(DataLoader(lines, batch_size=size, collate_fn=list if size else int))
    assert batches == ([[0, 1], [2, 3], [4]] if size else [0, 1, 2, 3, 4])
    assert lines.place == 0


def test_the_order_that_is_yet_to_come_stays():
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(range(8), batch_size=2, shuffle=True, generator=generator, collate_fn=list)
    before = generator.get_state()
    batches = read(loader)
    assert torch.equal(generator.get_state(), before)
    assert sorted(sample for batch in batches for sample in batch) == list(range(8))
    assert not torch.equal(torch.tensor(batches), torch.arange(8).view(4, 2))


def test_numbers_that_samples_draw_are_yet_to_come():
    class Noisy(Dataset):
        def __init__(self):
            self.transforms = [SimpleNamespace(noise=SimpleNamespace(generator=torch.Generator().manual_seed(1)))]
            self.many = torch.zeros(64, 64, 64).tolist()  # 262,144 objects

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.rand(2, generator=self.transforms[0].noise.generator)

    data = Noisy()
    generator = data.transforms[0].noise.generator
    before = generator.get_state()
    read(DataLoader(Subset(data, [0, 1, 2]), batch_size=2), 1)
    assert torch.equal(generator.get_state(), before)


def test_of_several_loaders_the_shorter_one_begins_again():
    loaders = {"long": in_lists(5), "short": in_lists(2)}
    assert read(loaders) == [{"long": part, "short": [0, 1]} for part in ([0, 1], [2, 3], [4])]
    assert read(CombinedLoader(loaders, "sequential")) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    "loaders", [in_lists(0), DataLoader(Lines(0), batch_size=2), {"a": in_lists(2), "b": in_lists(0)}]
)
def test_no_batch(loaders):
    with pytest.raises(ValueError, match=r"^the data has no batch$"):
        read(loaders)
