"""MetricOffload: the values of a plain run, metrics that are what they were, what it says."""

import copy
import logging
import pickle

import pytest
import torch
from support.helpers import describe_module
from support.metric_models import METRICS, LitMetrics, assert_equal_values
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from lightning_vram import MicroBatching
from lightning_vram.callbacks.metric_offload import MetricOffload
from lightning_vram.callbacks.metric_offload.callback import OffloadedMetric

pytestmark = pytest.mark.filterwarnings(
    "ignore:No (nega|posi)tive samples in targets",  # of one batch, in a bootstrap
    "ignore:Found 1 module.s. in eval mode",  # MetricTracker copies a metric between validation and training
)
CALLED_WARNING = "ignore:MetricOffload. a step calls metrics that store lists"
STAND_INS = {"forward", "_apply", "_sync_dist"}


def make_model(make_metric=BinaryAUROC, use="update", **arguments):
    torch.manual_seed(0)
    return LitMetrics(make_metric, use, **arguments)


OTHERS = ["auroc", "average precision", "nested items", "collection", "tracker", "bootstrapper"]


@pytest.mark.quick_sample(4)
@pytest.mark.filterwarnings(CALLED_WARNING)
@pytest.mark.parametrize(
    ("use", "name"),
    [*(("update", name) for name in OTHERS), ("log", "cat"), ("log", "detections"), ("forward", "minmax")],
)
def test_values_are_those_of_the_plain_run_in_every_stage(make_trainer, use, name):
    results = []
    for callbacks in ([], [MetricOffload()]):
        model, logged = make_model(METRICS[name], use), []
        trainer = make_trainer(callbacks=callbacks, num_sanity_val_steps=2)
        for run in (trainer.fit, trainer.validate, trainer.test) + ((trainer.predict,) if use != "log" else ()):
            run(model)
            logged.append(dict(trainer.callback_metrics))
        results.append(([model.values, logged], describe_module(model)))
    (plain, before), (ours, after) = results
    assert_equal_values(ours, plain)
    assert after == before


def test_states_that_are_saved_come_back(make_trainer, tmp_path):
    class Keeps(LitMetrics):
        def configure_model(self):
            super().configure_model()
            self.metric.persistent(mode=True)

        def on_validation_epoch_end(self):
            saved.append(torch.cat(self.metric.preds))
            trainer.save_checkpoint(tmp_path / "x.ckpt")

    saved = []
    torch.manual_seed(0)
    trainer = make_trainer(callbacks=[MetricOffload()])
    trainer.validate(Keeps(BinaryAUROC), verbose=False)
    again = Keeps(BinaryAUROC)
    make_trainer(callbacks=[MetricOffload()], limit_val_batches=0).validate(again, ckpt_path=tmp_path / "x.ckpt")
    assert torch.equal(torch.cat(again.metric.preds), saved[0])


def test_copies_in_a_run_are_plain_metrics_with_the_same_states():
    metric = BinaryAUROC()
    offloaded = OffloadedMetric(metric)
    metric.update(torch.tensor([0.1, 0.7]), torch.tensor([0, 1]))
    copies = [copy.deepcopy(metric), pickle.loads(pickle.dumps(metric)), metric.clone()]
    offloaded.remove()
    offloaded.remove()
    assert not STAND_INS & set(vars(metric))
    for one in [metric, *copies]:
        one.update(torch.tensor([0.5]), torch.tensor([0]))
        assert len(one.preds) == 2
        one.to("cpu")
        assert one.compute() == 1
        one.reset()
        assert len(one.preds) == 0


def test_lists_keep_no_graph():
    metric = METRICS["cat"]()
    OffloadedMetric(metric)
    preds = torch.ones(2, requires_grad=True) * 2
    metric.update(preds, None)
    assert preds.requires_grad
    assert not metric.value[0].requires_grad
    value = metric(preds, None)
    assert value.requires_grad  # of the batch: it may be a loss
    assert not any(item.requires_grad for item in metric.value)


def test_a_call_of_a_metric_with_lists_is_warned_of_once_in_a_run(make_trainer):
    callback = MetricOffload()
    expected = (
        "MetricOffload: a step calls metrics that store lists: metric.ap (BinaryAveragePrecision), metric.auroc "
        "(BinaryAUROC), metric.mixed (Mixed). Each call copies the whole list. "
        "Write `metric.update(preds, target)` instead of `metric(preds, target)`, and log the metric itself, "
        "`self.log('name', metric)`, or its value at the end of the epoch."
    )
    for _ in range(2):
        with pytest.warns(UserWarning, match="MetricOffload") as warned:
            make_trainer(callbacks=[callback]).validate(make_model(METRICS["collection"], "forward"), verbose=False)
        assert [str(one.message) for one in warned if "MetricOffload" in str(one.message)] == [expected]


def test_a_metric_without_lists_is_left_alone(make_trainer, caplog):
    class Mean(MeanMetric):
        def update(self, preds, target):
            super().update(preds)

    model = make_model(Mean)
    model.on_validation_batch_end = lambda *_: seen.update(STAND_INS & set(vars(model.metric)))
    seen = set()
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        make_trainer(callbacks=[MetricOffload()]).validate(model, verbose=False)
    assert not seen
    assert "MetricOffload has no effect: no metric of the module stores lists." in caplog.text


def test_on_a_host_it_says_that_nothing_is_gained(make_trainer, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        make_trainer(callbacks=[MetricOffload()]).validate(make_model(), verbose=False)
    sentence = "MetricOffload has no effect: the model is on the CPU, and so are its metrics' lists."
    assert sentence in caplog.text


def test_values_of_micro_batches(make_trainer):
    values = []
    for others in ([], [MetricOffload()]):
        model = make_model(METRICS["collection"])
        make_trainer(callbacks=[MicroBatching(2), *others]).fit(model)
        values.append(model.values)
    assert_equal_values(*values)
