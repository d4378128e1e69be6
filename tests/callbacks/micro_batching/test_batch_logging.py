"""What a run logs in micro-batches is what the plain run logs."""

import math
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitTiny, TinyCNN
from torchmetrics import MaxMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_vram.callbacks.micro_batching.step_state import BatchLogging, ShownValues, StepState
from lightning_vram.core.patching import MethodPatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:You called `self.log.'(count|best|x)', ....` in your:UserWarning"),  # integers
]


class Recorder(Logger):
    """Keeps what it is told."""

    name = version = "recorder"

    def __init__(self) -> None:
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


class LitLogging(LitTiny):
    """Logs in every way there is; no value depends on how samples are grouped."""

    def __init__(self) -> None:
        super().__init__(TinyCNN())
        self.train_accuracy = MulticlassAccuracy(num_classes=10, average="micro")
        kinds = (MulticlassPrecision, MulticlassAccuracy)
        self.metrics = MetricCollection([kind(num_classes=10, average="micro") for kind in kinds])
        self.val_accuracy = MulticlassAccuracy(num_classes=10)

    def training_step(self, batch, batch_idx):
        self.net.eval()  # norms would look at the other samples
        images, labels = batch
        pixels = images.flatten(1).double()
        self.log("mean", pixels.mean(), on_step=True, on_epoch=True, prog_bar=True)
        self.log("sum", pixels.sum(), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("max", pixels.max(), on_step=True, on_epoch=True, reduce_fx=max)
        self.log("min", pixels.min(), on_epoch=True, reduce_fx=torch.min)
        self.log("count", torch.tensor(len(labels)), reduce_fx="sum", on_epoch=True)
        self.log("best", labels.max(), reduce_fx="max", on_epoch=True)
        self.log("constant", 0.1, on_epoch=True)
        is_even = labels % 2 == 0
        if is_even.any():
            self.log("even", pixels[is_even].mean(), batch_size=int(is_even.sum()), on_step=True, on_epoch=True)
        self.train_accuracy(self.net(images), labels)
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.metrics(self.net(images), labels)
        self.log_dict(self.metrics, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        images, labels = batch
        self.log("val_mean", images.double().mean())
        self.val_accuracy.update(self.net(images), labels)
        self.log("val_accuracy", self.val_accuracy)

    def val_dataloader(self):
        return [super().val_dataloader(), super().val_dataloader()]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class InChunks(Callback):
    """Runs steps in micro-batches; drops a first try of each, with other sizes."""

    def __init__(self, sizes, failed_sizes=None) -> None:
        self.sizes = sizes
        self.failed_sizes = failed_sizes

    def on_fit_start(self, trainer, pl_module):
        state = StepState(pl_module, pl_module.device)

        def run(step, sizes, batch, *args):
            shown = ShownValues(pl_module) if len(sizes) > 1 else nullcontext()
            with BatchLogging(trainer._results) as logging, shown:
                total = 0
                for part in zip(*(column.split(sizes) for column in batch), strict=True):
                    share = len(part[0]) / len(batch[0])
                    logging.begin_part(len(part[0]), share)
                    if len(sizes) > 1:
                        shown.begin_part(len(part[0]), share)
                    output = step(part, *args)
                    total = None if output is None else total + output * share
            return total, logging

        def in_chunks(step):
            def run_twice(batch, *args):
                if self.failed_sizes is not None:
                    state.take()
                    run(step, self.failed_sizes, batch, *args)
                    state.restore()
                output, logging = run(step, self.sizes, batch, *args)
                logging.replay()
                return output

            return run_twice

        self.shadows = [MethodPatch(trainer.strategy, name, in_chunks) for name in ("training_step", "validation_step")]

    def teardown(self, trainer, pl_module, stage):
        for shadow in self.shadows:
            shadow.remove()


def fit(make_trainer, *callbacks):
    pl.seed_everything(0, verbose=False)
    recorder = Recorder()
    trainer = make_trainer(callbacks=list(callbacks), logger=recorder, log_every_n_steps=1)
    trainer.fit(LitLogging())
    return [*recorder.lines, (None, trainer.callback_metrics), (None, trainer.progress_bar_metrics)]


def assert_same_lines(lines, expected, **tolerances):
    assert [(step, sorted(line)) for step, line in lines] == [(step, sorted(line)) for step, line in expected]
    for (step, line), (_, plain) in zip(lines, expected, strict=True):
        for name, value in plain.items():
            torch.testing.assert_close(line[name], value, msg=f"{name} at {step}: {line[name]} {value}", **tolerances)


def test_a_run_in_micro_batches_logs_what_the_plain_run_does(make_trainer):
    assert_same_lines(fit(make_trainer, InChunks([1, 3])), fit(make_trainer))


def test_one_micro_batch_logs_the_same_bits_and_a_dropped_try_logs_nothing(make_trainer):
    assert_same_lines(fit(make_trainer, InChunks([4], failed_sizes=[2, 1, 1])), fit(make_trainer), rtol=0, atol=0)


def test_a_dropped_try_changes_no_bit_of_a_run_in_micro_batches(make_trainer):
    dropped, straight = (fit(make_trainer, InChunks([2, 2], failed_sizes=sizes)) for sizes in ([4], None))
    assert_same_lines(dropped, straight, rtol=0, atol=0)


# --- single entries ---


class Calls:
    """What reaches the results."""

    def __init__(self) -> None:
        self.results = _ResultCollection(training=True)
        self.seen = []
        self.shadow = MethodPatch(self.results, "log", self._note)

    def _note(self, log):
        def note(fx, name, value, **options):
            self.seen.append((name, value, options))
            log(fx, name, value, **options)

        return note


def replay(chunks, shares=None, **options):
    """Log a list of (name, value) pairs or values per chunk; returns what came out."""
    calls = Calls()
    with BatchLogging(calls.results) as logging:
        for number, chunk in enumerate(chunks):
            logging.begin_part(1, shares[number] if shares else 1 / len(chunks))
            for value in chunk if isinstance(chunk, list) else [chunk]:
                name, value, own = value if isinstance(value, tuple) else ("x", value, {})
                calls.results.log("training_step", name, value, **options, **own)
        assert not calls.seen
    logging.replay()
    logging.replay()
    return calls.seen


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


def test_the_calls_own_batch_sizes_weigh_and_add_up():
    chunks = [[("x", value, {"batch_size": size})] for value, size in zip(tensors(1, 5), (3, 1), strict=True)]
    assert replay(chunks, [0.5, 0.5]) == [("x", torch.tensor(2.0), {"batch_size": 4})]


def test_batch_sizes_that_only_count_the_samples_leave_the_shares_as_they_are():
    chunks = [[("x", value, {"batch_size": 1})] for value in tensors(1, 3)]
    assert replay(chunks, [0.75, 0.25]) == [("x", torch.tensor(1.5), {"batch_size": 2})]


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("sum", 6), (sum, 6), (torch.max, 3), ("min", 1), (min, 1), (torch.sum, 6)]
)
def test_whole_numbers_stay_whole(reduce_fx, expected):
    value = value_of(tensors(1, 2, 3, dtype=torch.int32), reduce_fx=reduce_fx)
    assert value == expected
    assert value.dtype is torch.int32


def test_truths_are_counted():
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


def test_unknown_reductions_are_refused_as_lightning_does():
    with pytest.raises(MisconfigurationException, match=r"reduce_fx=\{min,max,mean,sum\}"):
        replay(tensors(1, 2), reduce_fx=torch.prod)


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


class LitSynced(LitTiny):
    num_parts = 1

    def training_step(self, batch, batch_idx):
        with BatchLogging(self.trainer._results) as logging:
            for images in batch[0].chunk(self.num_parts):
                logging.begin_part(len(images), len(images) / len(batch[0]))
                self.log("pixel", images.double().mean(), sync_dist=True, on_step=True, on_epoch=True)
        logging.replay()
        return super().training_step(batch, batch_idx)

    def on_fit_start(self):
        self.num_parts = 1 + self.global_rank * self.is_uneven


@pytest.mark.distributed
def test_ranks_exchange_values_once_per_name_however_many_micro_batches_they_ran(make_trainer):
    metrics = []
    for LitSynced.is_uneven in (False, True):
        pl.seed_everything(0, verbose=False)
        trainer = make_trainer(strategy="ddp_fork", devices=2, max_epochs=1, limit_val_batches=0)
        trainer.fit(LitSynced(TinyCNN()))
        metrics.append(trainer.callback_metrics)
    torch.testing.assert_close(metrics[1], metrics[0])


def test_a_constant_batch_size_is_that_of_the_whole_batch():
    chunks = [[("x", value, {"batch_size": 2})] for value in tensors(1, 5)]
    assert replay(chunks, [0.75, 0.25]) == [("x", torch.tensor(2.0), {"batch_size": 2})]
