"""Batches of other sizes, as shapes."""

import re
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_vram.estimation.batches import (
    batch_size_of,
    count_elements,
    first_batch,
    largest_shape,
    sequence_length_of,
    with_batch_size,
    with_sequence_length,
)

TOKENS = {"ids": torch.zeros(4, 16, dtype=torch.int64), "mask": torch.ones(4, 1, 16, 16), "weight": torch.tensor(2.0)}


class Numbers(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.arange(12.0).view(6, 2), batch_size=3)


def test_the_size_of_a_batch_is_that_of_its_tensors():
    assert batch_size_of(TOKENS) == 4
    assert batch_size_of((torch.zeros(3, 2), torch.zeros(3))) == 3
    assert batch_size_of((torch.zeros(3, 2), torch.zeros(5))) is None


def test_the_elements_of_a_batch_are_those_of_all_its_tensors():
    assert count_elements(TOKENS) == 4 * 16 + 4 * 16 * 16 + 1
    assert largest_shape(TOKENS) == [4, 1, 16, 16]
    assert count_elements(["text", None]) == 0
    assert largest_shape(["text", None]) == []


def test_a_batch_of_another_size_has_other_shapes_and_repeats_its_integers():
    larger = with_batch_size({**TOKENS, "ids": torch.arange(4 * 16).view(4, 16)}, 4, 9)
    assert {name: tuple(tensor.shape) for name, tensor in larger.items()} == {
        "ids": (9, 16),
        "mask": (9, 1, 16, 16),
        "weight": (),
    }
    assert torch.equal(larger["ids"], torch.arange(4 * 16).view(4, 16)[[0, 1, 2, 3, 0, 1, 2, 3, 0]])
    assert larger["mask"].is_meta
    assert larger["ids"].dtype == torch.int64
    assert TOKENS["ids"].shape == (4, 16)


def test_sequences_are_those_of_whole_numbers():
    assert sequence_length_of(TOKENS) == 16
    assert sequence_length_of((torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))) is None
    longer = with_sequence_length(SimpleNamespace(**TOKENS), 16, 20)
    assert tuple(longer.ids.shape) == (4, 20)
    assert tuple(longer.mask.shape) == (4, 1, 20, 20)


def test_the_first_batch_comes_from_the_data():
    assert torch.equal(first_batch(pl.LightningModule(), Numbers()), torch.arange(6.0).view(3, 2))


def test_data_that_make_no_batch_are_refused_with_a_way_out():
    how = "Pass one: estimate_memory(module, batch, ...) takes any nest of tensors; only shapes and dtypes count"
    with pytest.raises(ValueError, match="LightningModule makes no batch") as refusal:
        first_batch(pl.LightningModule(), None)
    assert str(refusal.value).endswith(f"{how}.")

    class Empty(Numbers):
        def train_dataloader(self):
            return []

    with pytest.raises(ValueError, match=re.escape(f"Empty.train_dataloader() has no batch. {how}.")):
        first_batch(pl.LightningModule(), Empty())
