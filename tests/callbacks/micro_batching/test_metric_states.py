"""Metrics of a batch in micro-batches against torchmetrics on the whole batch; a dropped try leaves no trace."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError, PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

from lightning_vram.callbacks.micro_batching.step_state import ShownValues, StepState

NUM_SAMPLES = 12


def numbers(generator):
    return (torch.rand(NUM_SAMPLES, generator=generator, dtype=torch.float64),)


def pairs(generator):
    return torch.rand(NUM_SAMPLES, generator=generator), torch.rand(NUM_SAMPLES, generator=generator)


def scores(generator):
    return torch.rand(NUM_SAMPLES, generator=generator), torch.arange(NUM_SAMPLES) % 2


def classes(generator):
    return torch.randn(NUM_SAMPLES, 3, generator=generator), torch.arange(NUM_SAMPLES) % 3


MEANS = {  # of samples: their values can be averaged
    "mean absolute error": (MeanAbsoluteError, pairs),
    "accuracy": (lambda: MulticlassAccuracy(num_classes=3, average="micro"), classes),
    "mean": (MeanMetric, numbers),
}
OTHERS = {
    "cat": (CatMetric, numbers),
    "area under the curve": (lambda: BinaryAUROC(thresholds=None), scores),
    "max": (MaxMetric, numbers),
    "correlation": (PearsonCorrCoef, pairs),
}
CASES = MEANS | OTHERS


class Model(nn.Module):
    def __init__(self, metric) -> None:
        super().__init__()
        self.metric = metric
        self.idle = MeanMetric()


def batches(make_batch, num_batches=3):
    return [make_batch(torch.Generator().manual_seed(seed)) for seed in range(num_batches)]


def run_chunks(model, batch, sizes, style):
    with ShownValues(model) if len(sizes) > 1 else nullcontext() as shown:
        for chunk in zip(*(column.split(sizes) for column in batch), strict=True):
            if shown is not None:
                shown.begin_part(len(chunk[0]), len(chunk[0]) / NUM_SAMPLES)
            getattr(model.metric, style)(*chunk)


def run(metric, data, sizes, style):
    """Returns what the metric showed for each batch, and computed at the end."""
    model, seen = Model(metric), []
    for batch in data:
        run_chunks(model, batch, sizes, style)
        seen.append(copy.deepcopy(metric._forward_cache))
    return seen, metric.compute()


def run_plain(metric, data, style):
    shown = []
    for batch in data:
        getattr(metric, style)(*batch)
        shown.append(metric._forward_cache)
    return shown, metric.compute()


def by_value(item):
    if isinstance(item, torch.Tensor):
        return item.dtype, item.tolist()
    if isinstance(item, dict):
        return {name: by_value(value) for name, value in item.items()}
    if isinstance(item, list | tuple | set):
        return [by_value(value) for value in item]
    return item


def everything(model):
    return [by_value(vars(member)) for member in model.modules()]


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("style", ["forward", "update"])
@pytest.mark.parametrize("case", CASES)
def test_the_epoch_shows_what_it_does_without_micro_batches_and_so_do_steps_of_means(case, style):
    make, make_batch = CASES[case]
    data = batches(make_batch)
    shown, computed = run(make(), data, [5, 5, 2], style)
    expected_shown, expected = run_plain(make(), data, style)
    torch.testing.assert_close(computed, expected)
    if case in MEANS:
        torch.testing.assert_close(shown, expected_shown)


def test_the_value_of_a_batch_is_the_mean_of_the_micro_batches_by_share():
    (batch,) = batches(pairs, 1)
    expected = sum(
        PearsonCorrCoef()(*chunk) * len(chunk[0]) / NUM_SAMPLES
        for chunk in zip(*(column.split([5, 4, 3]) for column in batch), strict=True)
    )
    torch.testing.assert_close(run(PearsonCorrCoef(), [batch], [5, 4, 3], "forward")[0], [expected])


class Stubborn(Metric):
    """Writes its state in place, and counts beside it."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.num_calls = 0
        self.seen = []

    def update(self, value):
        self.total += value.sum()
        self.num_calls += 1
        self.seen.append(len(value))

    def compute(self):
        return self.total


WRAPPED = {
    "in place": (Stubborn, numbers),
    "classwise": (lambda: ClasswiseWrapper(MulticlassAccuracy(num_classes=3, average=None)), classes),
    "min and max": (lambda: MinMaxMetric(MeanAbsoluteError()), pairs),
    "sum of metrics": (lambda: MeanAbsoluteError() + MeanSquaredError(), pairs),
}


@pytest.mark.parametrize("style", ["forward", "update"])
@pytest.mark.parametrize("case", ["mean", "cat", *WRAPPED])
def test_after_restore_all_is_as_before_and_idle_metrics_keep_their_tensors(case, style):
    make, make_batch = (CASES | WRAPPED)[case]
    first, second = batches(make_batch, 2)
    model = Model(make())
    getattr(model.metric, style)(*first)
    before, idle_state = everything(model), model.idle.mean_value
    state = StepState(model, torch.device("cpu"))
    for sizes in ([NUM_SAMPLES], [6, 6]):
        state.take()
        run_chunks(model, second, sizes, style)
        model.metric.compute()
        assert model.idle.mean_value is idle_state
        state.restore()
        assert everything(model) == before
    model.metric.reset()


def make_collection():
    kinds = (MulticlassPrecision, MulticlassF1Score, MulticlassAccuracy)
    return MetricCollection([kind(num_classes=3, average="micro") for kind in kinds])


@pytest.mark.parametrize("style", ["forward", "update"])
def test_a_collection_with_compute_groups_counts_each_batch_once(style):
    data = batches(classes)
    plain, split = make_collection(), make_collection()
    model = Model(split)
    state = StepState(model, torch.device("cpu"))
    for batch in data:
        getattr(plain, style)(*batch)
        state.take()
        run_chunks(model, batch, [8, 4], style)
        state.restore()
        run_chunks(model, batch, [5, 5, 2], style)
    assert split.compute_groups == plain.compute_groups
    assert_same(split.compute(), plain.compute())


def test_the_value_in_a_micro_batch_has_its_gradient():
    model = Model(MeanSquaredError())
    with ShownValues(model) as shown:
        for _ in range(2):
            shown.begin_part(3, 0.5)
            predictions = torch.full((3,), 2.0, requires_grad=True)
            model.metric(predictions, torch.zeros(3)).backward()
            assert predictions.grad.tolist() == pytest.approx([4 / 3] * 3)
    assert model.metric._forward_cache == 4.0


def test_groups_that_a_dropped_try_formed_are_dissolved():
    model = Model(make_collection())
    before = copy.deepcopy(model.metric.compute_groups)
    state = StepState(model, torch.device("cpu")).take()
    run_chunks(model, batches(classes, 1)[0], [8, 4], "update")
    assert model.metric.compute_groups != before
    state.restore()
    assert model.metric.compute_groups == before
    assert not any(metric.update_called for metric in model.metric.values())
