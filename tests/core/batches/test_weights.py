"""What a batch weighs."""

from collections import UserDict

import numpy as np
import pytest
import torch
from support.devices import DEVICE, refuse_waits

from lightning_vram.core.batches.micro_batches import make_batch_weight

LABELS = torch.tensor([[-100, 1, 2, -100], [3, 4, -100, -100]])
INPUTS = torch.zeros(2, 4, 3)
WAY_OUT = "Give a function of the batch that returns its weight."


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs": INPUTS, "labels": LABELS},
        {"target": LABELS},
        UserDict(labels=LABELS, inputs=INPUTS),
        (INPUTS, LABELS),
        [INPUTS, INPUTS, LABELS],
        LABELS,
    ],
    ids=["labels", "target", "other mapping", "tuple", "list", "tensor"],
)
def test_tokens_are_labels_that_are_not_ignored(batch):
    assert make_batch_weight("tokens", "weight")(batch) == 4
    assert make_batch_weight("shifted_tokens", "weight")(batch) == 3


@pytest.mark.parametrize("batch", [{"inputs": INPUTS, "labels": LABELS}, (INPUTS, LABELS), INPUTS])
def test_samples_are_counted(batch):
    assert make_batch_weight("samples", "weight")(batch) == 2


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"inputs": INPUTS, "mask": INPUTS}, "dict(inputs: float32[2, 4, 3], mask: float32[2, 4, 3])"),
        ((LABELS, INPUTS), "tuple(int64[2, 4], float32[2, 4, 3])"),
        ({"inputs": INPUTS, "labels": None}, "dict(inputs: float32[2, 4, 3], labels: NoneType)"),
        ({"target": INPUTS}, "dict(target: float32[2, 4, 3])"),
    ],
)
def test_a_batch_without_labels_is_an_error_that_says_what_there_is(batch, found):
    with pytest.raises(ValueError, match=r"^weight='tokens' found") as caught:
        make_batch_weight("tokens", "weight")(batch)
    assert str(caught.value) == f"weight='tokens' found no integer labels in {found}. {WAY_OUT}"


def test_samples_of_a_batch_that_disagrees_are_an_error_with_the_way_out():
    with pytest.raises(ValueError, match="cannot count") as caught:
        make_batch_weight("samples", "weight")({"inputs": INPUTS, "targets": torch.zeros(3)})
    assert str(caught.value) == (
        "weight='samples' cannot count the samples of a batch. Give a function of the batch that returns their "
        'number, or define split_batch(batch, size) on the LightningModule. batch["targets"] has 3 rows (float32[3]), '
        'but the batch has 2 samples (batch["inputs"] has 2 rows).'
    )


@pytest.mark.parametrize("value", [3, 3.0, torch.tensor([[3.0]]), np.int64(3)])
def test_a_function_weighs_by_a_number(value):
    assert make_batch_weight(lambda batch: value, "weight")(INPUTS) == 3


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("3", TypeError, "weight must return a number for each batch, got '3'."),
        (torch.ones(2), TypeError, "weight must return a number for each batch, got a tensor of shape [2]."),
        (-1, ValueError, "weight must return a finite number of at least 0 for each batch, got -1."),
        (
            torch.tensor(torch.inf),
            ValueError,
            "weight must return a finite number of at least 0 for each batch, got inf.",
        ),
    ],
)
def test_a_function_that_returns_no_weight_is_told(value, error, message):
    with pytest.raises(error) as caught:
        make_batch_weight(lambda batch: value, "weight")(INPUTS)
    assert str(caught.value) == message


@pytest.mark.device
def test_a_weight_on_the_device_is_not_waited_for():
    labels = LABELS.to(DEVICE)
    with refuse_waits():
        weights = [make_batch_weight(kind, "w")(labels) for kind in ("tokens", lambda labels: (labels > 0).sum())]
    assert [int(weight) for weight in weights] == [4, 4]
