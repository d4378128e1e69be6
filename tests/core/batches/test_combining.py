"""combine_outputs: each rule, and what fits none."""

import re
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from lightning_vram.core.batches.micro_batches import OutputCombineError, combine_outputs

NESTED = torch.nested.nested_tensor([torch.ones(2, 3)] * 3, layout=torch.jagged)
HOOK = "Define combine_outputs(outputs, sizes) on the LightningModule."
Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor
    loss: float


def combine(*outputs, sizes=(3, 1)):
    return combine_outputs(outputs, sizes, [size / sum(sizes) for size in sizes])


def refusal(*outputs, sizes=(3, 1)):
    with pytest.raises(OutputCombineError) as caught:
        combine(*outputs, sizes=sizes)
    return str(caught.value)


def test_nothing_stays_nothing():
    assert combine(None, None) is None


def test_one_output_is_returned_as_it_is():
    output = {"count": torch.tensor(3), "other": object()}
    assert combine(output, sizes=(4,)) is output


def test_rows_are_joined_without_a_graph():
    first, second = torch.randn(3, 2, requires_grad=True), torch.randn(1, 2, requires_grad=True)
    whole = combine(first * 2, second * 2)
    assert torch.equal(whole, torch.cat([first, second]) * 2)
    assert not whole.requires_grad


def test_losses_are_averaged_by_their_shares():
    first = torch.tensor(1.0, requires_grad=True)
    whole = combine(first * 1, torch.tensor(5.0))
    assert whole.item() == 2.0
    assert not whole.requires_grad
    assert combine(1.0, 5.0) == 2.0
    assert combine(np.float32(1), np.float32(5)) == 2.0
    assert type(combine(np.float32(1), np.float32(5))) is np.float32
    shares = [torch.tensor(0.75, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)]
    assert combine_outputs([torch.tensor(1.0), torch.tensor(5.0)], [3, 1], shares).dtype is torch.float32
    assert combine_outputs([1.0, 5.0], [3, 1], shares) == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_losses_stay_equal_to_the_bit(dtype):
    for value in torch.randn(50, dtype=torch.float64):
        loss = value.to(dtype)
        whole = combine_outputs([loss.clone() for _ in range(3)], [1, 1, 1], [0.1, 0.2, 0.7])
        assert whole.dtype is dtype
        assert torch.equal(whole, loss)


def test_structures_are_combined_entry_by_entry():
    parts = [
        {"out": Output(torch.full((size, 2), size), size / 2), "pair": Pair([torch.ones(size), "text"], (7, None))}
        for size in (3.0, 1.0)
        for size in [int(size)]
    ]
    whole = combine(*parts)
    assert whole["out"].logits[:, 0].tolist() == [3, 3, 3, 1]
    assert whole["out"].loss == 0.75 * 1.5 + 0.25 * 0.5
    assert whole["pair"].x[0].shape == (4,)
    assert whole["pair"].x[1] == "text"
    assert whole["pair"].y == (7, None)
    assert parts[0]["out"].logits.shape == (3, 2)


def test_outputs_of_transformers_keep_their_class():
    whole = combine(*(BaseModelOutput(last_hidden_state=torch.ones(size, 2)) for size in (3, 1)))
    assert type(whole) is BaseModelOutput
    assert whole.last_hidden_state.shape == whole["last_hidden_state"].shape == (4, 2)


def test_lists_of_samples_are_joined():
    detections = [{"boxes": torch.ones(k, 4, requires_grad=True) * 1} for k in (2, 0, 5, 1)]
    whole = combine(detections[:3], detections[3:])
    assert [found["boxes"].shape[0] for found in whole] == [2, 0, 5, 1]
    assert not whole[0]["boxes"].requires_grad
    assert combine(list("abc"), ["d"]) == list("abcd")
    assert combine((1, 2), (3, 4), sizes=(2, 2)) == (1, 2, 3, 4)


def test_a_tuple_of_columns_is_one_of_columns_in_parts_of_any_size():
    (inner, outer), text = combine(*[((torch.ones(2), torch.zeros(2)), "a") for _ in range(2)], sizes=(2, 2))
    assert inner.tolist() == [1] * 4
    assert outer.tolist() == [0] * 4
    assert text == "a"


def test_what_is_the_same_in_all_parts_is_returned():
    shared = torch.ones(7)
    whole = combine({"w": shared, "n": None, "t": "a", "b": True}, {"w": shared, "n": None, "t": "a", "b": True})
    assert whole["w"] is shared
    assert (whole["n"], whole["t"], whole["b"]) == (None, "a", True)


def test_arrays_are_joined():
    assert combine(np.arange(3), np.arange(1)).tolist() == [0, 1, 2, 0]
    assert combine(np.array(1.0), np.array(5.0)) == 2.0


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (torch.tensor(3), torch.tensor(4), "(int64[]) are ambiguous: counts"),
        (3, 3, "(int) are ambiguous: counts that add up, or one value for all"),
        (np.int64(3), np.int64(3), "(int64) are ambiguous: counts"),
        ({0: 1.0, 1: 2.0}, {0: 3.0, 1: 4.0}, "(dict) have integer keys"),
        (NESTED, NESTED.clone(), "(nested float32) are unknown"),
        ("a", "b", "(str) differ: 'a', 'b'"),
        (torch.ones(2), torch.ones(1), "(float32[2], float32[1]) do not have a row for each of [3, 1] samples"),
        (
            torch.ones(3, 5, 2),
            torch.ones(1, 4, 2),
            "(float32[3, 5, 2], float32[1, 4, 2]) differ in more than the number",
        ),
        (np.ones((3, 5)), np.ones((1, 4)), "(float64[3, 5], float64[1, 4]) differ in more than the number of rows"),
        (torch.tensor(1.0), torch.tensor(1.0).double(), "(float32[], float64[]) differ in dtype"),
        (torch.tensor(1.0), None, "(float32[], NoneType) have different types"),
        (1.0, 2, "(float, int) have different types"),
        ({"a": 1}, {"b": 1}, "(dict) differ in what they hold"),
        ([1, 2], [1], "(list) differ in length"),
        (object(), object(), "(object) are unknown"),
    ],
)
def test_what_fits_no_rule_is_refused_by_name(first, second, found):
    message = refusal({"it": [first, "x", "y"]}, {"it": [second, "x", "y"]})
    assert message.startswith(f'output["it"][0] cannot be combined: its values {found}')
    assert message.endswith(HOOK)


def test_a_list_that_may_hold_columns_or_samples_is_refused():
    detections = [[{"boxes": torch.ones(1, 4)}], [{"boxes": torch.ones(1, 4)}]]
    message = refusal(*detections, sizes=(1, 1))
    assert re.fullmatch(
        r"output cannot be combined: .* are ambiguous: columns, or an entry for each sample\. .*", message
    )
