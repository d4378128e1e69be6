"""What a run logs in micro-batches is what the plain run logs."""

import math
from functools import partial

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import MaxMetric

from lightning_vram.callbacks.micro_batching.step_state import BatchLogging
from lightning_vram.core.patching import MethodPatch

pytestmark = pytest.mark.filterwarnings("ignore:You called `self.log.'x', ....` in your:UserWarning")  # integers


def replay(chunks, shares=None, **options):
    """Log a list of (name, value) pairs or values per chunk; returns what came out."""
    results, seen = _ResultCollection(training=True), []

    def note(log, fx, name, value, **options):
        seen.append((name, value, options))
        log(fx, name, value, **options)

    MethodPatch(results, "log", partial(partial, note))
    with BatchLogging(results) as logging:
        for number, chunk in enumerate(chunks):
            logging.begin_part(1, shares[number] if shares else 1 / len(chunks))
            for value in chunk if isinstance(chunk, list) else [chunk]:
                name, value, own = value if isinstance(value, tuple) else ("x", value, {})
                results.log("training_step", name, value, **options, **own)
        assert not seen
    logging.replay()
    logging.replay()
    return seen


def value_of(*args, **kwargs):
    ((_, value, _),) = replay(*args, **kwargs)
    return value


def tensors(*values, dtype=torch.float32):
    return [torch.tensor(value, dtype=dtype) for value in values]


@pytest.mark.parametrize("value", [0.1, 1e-38, math.inf, -math.inf, math.nan, 3.0e38])
def test_equal_values_stay_equal_to_the_bit(value):
    values = tensors(*[value] * 3)
    for shares in ([0.3, 0.3, 0.4], tensors(0.3, 0.3, 0.4)):
        torch.testing.assert_close(value_of(values, shares), values[0], rtol=0, atol=0, equal_nan=True)


def test_a_mean_is_weighted_by_shares_over_the_micro_batches_that_logged():
    assert value_of([*tensors(1, 2), [], *tensors(6)], [0.25, 0.25, 0.25, 0.25]) == 3
    assert value_of(tensors(1, 3), [0.75, 0.25]) == 1.5
    assert value_of(tensors(1, 3), tensors(0.75, 0.25)) == 1.5


@pytest.mark.parametrize("shares", [[0.0, 0.0], tensors(0, 0)], ids=["numbers", "tensors"])
def test_a_mean_of_parts_that_weigh_nothing_is_over_samples(shares):
    assert value_of(tensors(1, 3), shares) == 2


@pytest.mark.parametrize(
    ("batch_sizes", "shares", "expected", "batch_size"),
    [((3, 1), (0.5, 0.5), 2.0, 4), ((1, 1), (0.75, 0.25), 2.0, 2), ((2, 2), (0.75, 0.25), 2.0, 2)],
    ids=["the call's own weigh and add up", "numbers of samples leave shares", "a constant is that of the whole batch"],
)
def test_batch_sizes(batch_sizes, shares, expected, batch_size):
    chunks = [[("x", value, {"batch_size": size})] for value, size in zip(tensors(1, 5), batch_sizes, strict=True)]
    assert replay(chunks, list(shares)) == [("x", torch.tensor(expected), {"batch_size": batch_size})]


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("sum", 6), (sum, 6), (torch.max, 3), ("min", 1), (min, 1), (torch.sum, 6)]
)
def test_whole_numbers_stay_whole_and_truths_are_counted(reduce_fx, expected):
    value = value_of(tensors(1, 2, 3, dtype=torch.int32), reduce_fx=reduce_fx)
    assert value == expected
    assert value.dtype is torch.int32
    assert value_of(tensors(True, False, True, dtype=torch.bool), reduce_fx="sum") == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_means_of_whole_or_short_numbers_are_taken_in_float32(dtype):
    value = value_of(tensors(1, 2, dtype=dtype))
    assert value == 1.5
    assert value.dtype is torch.float32


def test_a_name_logged_twice_in_a_micro_batch_is_logged_twice_in_order():
    chunks = [[("x", value, {}), ("y", value, {}), ("x", value * 10, {})] for value in tensors(1, 3)]
    assert [(name, float(value)) for name, value, _ in replay(chunks)] == [("x", 2), ("y", 2), ("x", 20)]


def test_a_metric_is_logged_once():
    metric = MaxMetric()
    assert [(name, value is metric) for name, value, _ in replay([metric, metric])] == [("x", True)]


def test_values_keep_no_graph_unless_asked():
    weight = torch.ones((), requires_grad=True)
    assert not value_of([weight * 1, weight * 3]).requires_grad
    assert value_of([weight * 1, weight * 3], enable_graph=True).requires_grad


def test_options_are_passed_on():
    options = {"prog_bar": True, "on_step": True, "reduce_fx": "mean"}
    assert [seen for _, _, seen in replay(tensors(1, 2), **options)] == [options]


def test_nothing_stands_in_for_log_after_an_error():
    results = _ResultCollection(training=True)

    def fail():
        with BatchLogging(results):
            results.log("training_step", "x", torch.tensor(1.0))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert "log" not in vars(results)
    assert not results
