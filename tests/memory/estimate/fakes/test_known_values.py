"""Values of fake tensors: those that follow from the program are known."""

import pytest
import torch
from torch import nn

from lightning_vram.memory.estimate.fake_device import FAKE_GPU, fake_device
from lightning_vram.private_names.dispatcher import FakeTensor


@pytest.fixture
def device():
    with fake_device(num_bytes=1 << 30, allocated_bytes=lambda: 0, on_pin=lambda tensor: None) as (_, values):
        yield values


def test_numbers_made_by_the_program_are_known_on_the_host_and_on_the_card(device):
    for where in ("cpu", FAKE_GPU):
        number = torch.tensor(3.0, device=where) * 2 + 1
        assert isinstance(number, FakeTensor)
        assert number.item() == 7
        assert torch.tensor([1, 5, 2], device=where).max().item() == 5
        assert torch.arange(4, device=where).tolist() == [0, 1, 2, 3]
    assert not device.guesses


def test_writes_of_known_numbers_keep_a_tensor_known(device):
    step = torch.zeros((), device=FAKE_GPU)
    step += 1
    torch._foreach_add_([step], 2)
    assert step.item() == 3
    flags = torch.zeros(3)
    flags[1] = 4
    assert flags.tolist() == [0, 4, 0]


def test_writes_of_data_make_a_tensor_unknown_and_all_that_shares_its_memory(device):
    counts = torch.zeros(3, dtype=torch.int64)
    part = counts[1:]
    part.copy_(torch.randint(0, 9, (2,)))
    with pytest.raises(RuntimeError):
        counts[1].item()


def test_a_float_that_depends_on_data_is_one_and_that_is_said(device):
    loss = nn.Linear(3, 1)(torch.randn(2, 3)).mean()
    assert loss.item() == 1
    assert list(device.guesses) == [
        "The step reads numbers that depend on the data. Each was taken to be 1.",
    ]


def test_tensors_are_said_to_be_equal_and_that_is_said(device):
    assert torch.equal(torch.randn(3, device=FAKE_GPU), torch.randn(3, device=FAKE_GPU))
    assert list(device.guesses) == ["The step compares tensors by value. They were taken to be equal."]


def test_an_integer_that_depends_on_data_is_refused(device):
    with pytest.raises(RuntimeError):
        torch.randint(0, 9, ()).item()
    with pytest.raises(RuntimeError):
        bool(torch.randn(()) > 0)


@pytest.mark.parametrize(
    "pick",
    [
        lambda table, rows: nn.functional.embedding(rows, table),
        lambda table, rows: table[:, rows],
        lambda table, rows: table.index_select(0, rows),
        lambda table, rows: table.gather(1, rows[None]),
        lambda table, rows: nn.functional.embedding_bag(rows[None], table),
    ],
)
@pytest.mark.parametrize("where", ["cpu", FAKE_GPU])
def test_known_indices_out_of_range_are_refused(device, pick, where):
    table = torch.randn(6000, 6000, device=where).requires_grad_()
    pick(table, torch.arange(6000, device=where))
    with pytest.raises(IndexError, match=r"index 6000 is out of bounds for dimension \d with size 6000"):
        pick(table, torch.arange(1, 6001, device=where))
    pick(table, torch.randint(9000, (3,), device=where))  # nobody knows


REAL_IDS = torch.ones(2, 9, dtype=torch.int64)


def test_values_of_data_are_looked_at_for_indices_and_for_nothing_else(device):
    ids = torch.empty(2, 9, dtype=torch.int64)
    device.know(ids, REAL_IDS)
    places = (ids.ne(0).cumsum(1) - 1).to(FAKE_GPU)
    assert device.is_unknown(places)
    with pytest.raises(RuntimeError):
        places.max().item()
    nn.functional.embedding(places, torch.empty(9, 2, device=FAKE_GPU))
    with pytest.raises(IndexError, match="index 8 is out of bounds for dimension 0 with size 8"):
        nn.functional.embedding(places, torch.empty(8, 2, device=FAKE_GPU))
