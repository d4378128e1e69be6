"""Metrics of a batch in micro-batches against torchmetrics on the whole batch; a dropped try leaves no trace."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMetric, RunningMean, SumMetric
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
    "sum": (SumMetric, numbers),
    "cat": (CatMetric, numbers),
    "area under the curve": (lambda: BinaryAUROC(thresholds=None), scores),
    "min": (MinMetric, numbers),
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


def run(metric, data, sizes, style, failed_sizes=()):
    """Returns what the metric showed for each batch, and computed at the end."""
    model, seen = Model(metric), []
    state = StepState(model, torch.device("cpu"))
    for batch in data:
        if failed_sizes:
            state.take()
            run_chunks(model, batch, failed_sizes, style)
            state.restore()
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
    """All there is in a module and in those in it."""
    return [by_value(vars(member)) for member in model.modules()]


def assert_same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("style", ["forward", "update"])
@pytest.mark.parametrize("case", CASES)
def test_with_one_micro_batch_nothing_is_different(case, style):
    make, make_batch = CASES[case]
    assert_same(run(make(), batches(make_batch), [NUM_SAMPLES], style), run_plain(make(), batches(make_batch), style))


@pytest.mark.parametrize("style", ["forward", "update"])
@pytest.mark.parametrize("case", MEANS)
def test_steps_and_epoch_show_what_they_do_without_micro_batches(case, style):
    make, make_batch = CASES[case]
    data = batches(make_batch)
    torch.testing.assert_close(run(make(), data, [5, 5, 2], style), run_plain(make(), data, style))


@pytest.mark.parametrize("style", ["forward", "update"])
@pytest.mark.parametrize("case", OTHERS)
def test_the_epoch_shows_what_it_does_without_micro_batches(case, style):
    make, make_batch = CASES[case]
    data = batches(make_batch)
    _, computed = run(make(), data, [5, 5, 2], style)
    torch.testing.assert_close(computed, run_plain(make(), data, style)[1])


def test_the_value_of_a_batch_is_the_mean_of_the_micro_batches_by_share():
    (batch,) = batches(pairs, 1)
    expected = sum(
        PearsonCorrCoef()(*chunk) * len(chunk[0]) / NUM_SAMPLES
        for chunk in zip(*(column.split([5, 4, 3]) for column in batch), strict=True)
    )
    torch.testing.assert_close(run(PearsonCorrCoef(), [batch], [5, 4, 3], "forward")[0], [expected])


@pytest.mark.parametrize("style", ["forward", "update"])
@pytest.mark.parametrize("case", CASES)
def test_a_dropped_try_changes_no_bit(case, style):
    make, make_batch = CASES[case]
    data = batches(make_batch)
    assert_same(run(make(), data, [4, 4, 4], style, failed_sizes=[6, 6]), run(make(), data, [4, 4, 4], style))


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


class MeanOfMeans(Metric):
    """Averages over updates."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, value):
        self.mean = value.mean()

    def compute(self):
        return self.mean


def test_states_that_are_means_show_the_mean_of_equal_micro_batches():
    data = batches(numbers)
    shown, _ = run(MeanOfMeans(), data, [4, 4, 4], "forward")
    torch.testing.assert_close(shown, run_plain(MeanOfMeans(), data, "forward")[0], check_dtype=False)


WRAPPED = {
    "in place": (Stubborn, numbers),
    "classwise": (lambda: ClasswiseWrapper(MulticlassAccuracy(num_classes=3, average=None)), classes),
    "running": (lambda: RunningMean(window=2), numbers),
    "min and max": (lambda: MinMaxMetric(MeanAbsoluteError()), pairs),
    "sum of metrics": (lambda: MeanAbsoluteError() + MeanSquaredError(), pairs),
}


@pytest.mark.parametrize("style", ["forward", "update"])
@pytest.mark.parametrize("case", CASES | WRAPPED)
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


@pytest.mark.parametrize("style", ["forward", "update"])
def test_the_epoch_of_a_classwise_metric_is_that_without_micro_batches(style):
    make, make_batch = WRAPPED["classwise"]
    data = batches(make_batch)
    assert_same(run(make(), data, [5, 7], style)[1], run_plain(make(), data, style)[1])


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


def test_groups_that_a_dropped_try_formed_are_dissolved():
    model = Model(make_collection())
    before = copy.deepcopy(model.metric.compute_groups)
    state = StepState(model, torch.device("cpu")).take()
    run_chunks(model, batches(classes, 1)[0], [8, 4], "update")
    assert model.metric.compute_groups != before
    state.restore()
    assert model.metric.compute_groups == before
    assert not any(metric.update_called for metric in model.metric.values())


def test_a_metric_called_twice_in_a_step_shows_its_last_call():
    model = Model(MeanMetric())
    with ShownValues(model) as shown:
        for first, last in ((10.0, 1.0), (20.0, 3.0)):
            shown.begin_part(1, 0.5)
            model.metric(first)
            model.metric(last)
    assert model.metric._forward_cache == 2.0
    assert model.metric.compute() == 8.5


def test_a_part_that_counts_for_nothing_is_not_shown():
    model = Model(MeanMetric())
    state = StepState(model, torch.device("cpu"))
    with ShownValues(model) as shown:
        for value in (1.0, 3.0):
            shown.begin_part(1, 0.5)
            model.metric(value)
        state.take()
        model.metric(100.0)
        state.restore()
    assert model.metric._forward_cache == 2.0
    assert model.metric.compute() == 2.0


def test_a_metric_that_no_micro_batch_calls_shows_what_it_did():
    model = Model(MeanMetric())
    model.metric(4.0)
    with ShownValues(model) as shown:
        shown.begin_part(1, 1.0)
    assert model.metric._forward_cache == 4.0


def test_values_that_are_no_mean_show_that_of_the_last_micro_batch():
    model = Model(SumMetric())
    with ShownValues(model) as shown:
        for value in (torch.tensor(1), torch.ones(2)):
            shown.begin_part(1, 0.5)
            model.metric._forward_cache = value
    assert model.metric._forward_cache.tolist() == [1.0, 1.0]


class Weak(torch.autograd.Function):
    """Saves what tells whether the graph is alive."""

    @staticmethod
    def forward(ctx, inputs, saved):
        ctx.saved = saved
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Token:
    """Can be referred to weakly."""


GRAPHS = {
    "merged": (MeanSquaredError, pairs),
    "averaged": (PearsonCorrCoef, pairs),
    "a collection": (lambda: MetricCollection([MeanSquaredError(), MeanAbsoluteError()]), pairs),
}


def run_differentiable(model, batch, sizes):
    """Returns for each micro-batch whether its graph was alive when the next one began, and at the end."""
    tokens, alive = [], []
    with ShownValues(model) as shown:
        for predictions, target in zip(*(column.split(sizes) for column in batch), strict=True):
            shown.begin_part(len(target), len(target) / NUM_SAMPLES)
            alive.append([token() is not None for token in tokens])
            token = Token()
            tokens.append(weakref.ref(token))
            noted = Weak.apply(predictions.clone().requires_grad_(), token)
            del token
            model.metric(noted, target)
            (noted - target).square().mean().backward()
            del noted
    return alive, [token() is not None for token in tokens]


@pytest.mark.parametrize("case", GRAPHS)
def test_the_graph_of_a_micro_batch_does_not_outlive_it(case):
    make, make_batch = GRAPHS[case]
    model, plain = Model(make()), Model(make())
    for batch in batches(make_batch, 2):
        alive, alive_at_the_end = run_differentiable(model, batch, [5, 5, 2])
        run_chunks(plain, batch, [5, 5, 2], "forward")
        assert alive == [[], [False], [False, False]]
        assert not any(alive_at_the_end)
        if isinstance(model.metric, Metric):
            assert_same(model.metric._forward_cache, plain.metric._forward_cache)
    assert_same(model.metric.compute(), plain.metric.compute())


def test_the_value_in_a_micro_batch_has_its_gradient():
    model = Model(MeanSquaredError())
    with ShownValues(model) as shown:
        for _ in range(2):
            shown.begin_part(3, 0.5)
            predictions = torch.full((3,), 2.0, requires_grad=True)
            model.metric(predictions, torch.zeros(3)).backward()
            assert predictions.grad.tolist() == pytest.approx([4 / 3] * 3)
    assert model.metric._forward_cache == 4.0
