"""What becomes of batches: outputs are combined, running statistics forget as much, and what a batch weighs."""

import copy
import re
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.devices import DEVICE, refuse_waits
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_vram.core.batches.micro_batches import (
    NormMomentum,
    OutputCombineError,
    combine_outputs,
    find_batch_norms,
    make_batch_weight,
)

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


def test_nothing_and_one_output_are_returned_as_they_are():
    output = {"count": torch.tensor(3), "other": object()}
    assert combine(output, sizes=(4,)) is output
    assert combine(None, None) is None


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


@pytest.fixture
def net():
    return nn.ModuleDict(
        {
            "plain": nn.BatchNorm1d(2, momentum=0.3),
            "frozen": nn.BatchNorm1d(2).eval(),
            "cumulative": nn.BatchNorm1d(2, momentum=None),
            "stateless": nn.BatchNorm1d(2, track_running_stats=False),
            "instance": nn.InstanceNorm1d(2, momentum=0.5, track_running_stats=True),
            "layer": nn.LayerNorm(2),
        }
    )


def momenta(net):
    return {name: getattr(module, "momentum", None) for name, module in net.items()}


def test_equal_parts_forget_as_much_as_a_batch(net):
    before, momentum = momenta(net), NormMomentum(net)
    assert momentum.names == ("plain", "instance")
    momentum.scale(1 / 4)
    assert (1 - net["plain"].momentum) ** 4 == pytest.approx(0.7, abs=1e-15)
    assert (1 - net["instance"].momentum) ** 4 == pytest.approx(0.5, abs=1e-15)
    momentum.restore()
    momentum.restore()
    assert momenta(net) == before


def test_a_mean_over_parts_of_the_same_data_is_that_of_the_batch(net):
    norm, whole = net["plain"], copy.deepcopy(net["plain"])
    samples = torch.randn(8, 2, dtype=torch.float64)
    norm.double()
    whole.double()(samples)
    momentum = NormMomentum(norm)
    for share in (0.25, 0.5, 0.25):
        momentum.scale(share)
        norm(samples)
    assert torch.allclose(norm.running_mean, whole.running_mean, rtol=0, atol=1e-15)
    assert torch.allclose(norm.running_var, whole.running_var, rtol=0, atol=1e-15)


def test_a_second_scaling_replaces_the_first_and_one_is_exact(net):
    momentum = NormMomentum(net)
    momentum.scale(1 / 2)
    momentum.scale(1 / 3)
    assert net["plain"].momentum == 1 - 0.7 ** (1 / 3)
    momentum.scale(1)
    assert net["plain"].momentum == 0.3


def test_mode_counts_at_the_time_of_scaling(net):
    momentum = NormMomentum(net)
    net["plain"].eval()
    net["frozen"].train()
    assert momentum.names == ("frozen", "instance")
    momentum.scale(1 / 2)
    net["frozen"].eval()
    momentum.restore()
    assert (net["plain"].momentum, net["frozen"].momentum) == (0.3, 0.1)


def test_layers_that_go_by_the_batch_are_found(net):
    assert find_batch_norms(net) == ("plain", "cumulative", "stateless")
    net.eval()
    assert find_batch_norms(net) == ("stateless",)


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
        ("3", TypeError, "a number for each batch, got '3'."),
        (torch.ones(2), TypeError, "a number for each batch, got a tensor of shape [2]."),
        (-1, ValueError, "a finite number of at least 0 for each batch, got -1."),
        (torch.tensor(torch.inf), ValueError, "a finite number of at least 0 for each batch, got inf."),
    ],
)
def test_a_function_that_returns_no_weight_is_told(value, error, message):
    with pytest.raises(error) as caught:
        make_batch_weight(lambda batch: value, "weight")(INPUTS)
    assert str(caught.value) == f"weight must return {message}"


@pytest.mark.device
def test_a_weight_on_the_device_is_not_waited_for():
    labels = LABELS.to(DEVICE)
    with refuse_waits():
        weights = [make_batch_weight(kind, "w")(labels) for kind in ("tokens", lambda labels: (labels > 0).sum())]
    assert [int(weight) for weight in weights] == [4, 4]


def test_norms_are_scaled_twice_and_what_somebody_else_has_written_stays(net):
    outer, inner = NormMomentum(net), NormMomentum(net)
    outer.scale(1 / 2)
    inner.scale(1 / 3)
    assert 1 - (1 - net["plain"].momentum) ** 6 == pytest.approx(0.3, abs=1e-15)
    inner.restore()
    assert net["plain"].momentum == 1 - 0.7 ** (1 / 2)
    net["instance"].momentum = 0.05
    outer.restore()
    assert (net["plain"].momentum, net["instance"].momentum) == (0.3, 0.05)
