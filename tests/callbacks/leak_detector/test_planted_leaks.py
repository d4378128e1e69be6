"""Each planted leak is named by the attribute that holds it, with the line that made it."""

import re
import warnings

import pytest
import torch
from support import leaky_models as leaky
from torch.utils.data import DataLoader

from lightning_vram.callbacks.leak_detector import LeakDetector, callback
from lightning_vram.callbacks.leak_detector.callback import MemoryLeakError

DETECTOR = {"patience": 5, "min_bytes_per_step": 2048}
WITH_GRAPH = r"Store value\.detach\(\) instead\."
WITHOUT = r"Clear it, limit its length, or move its tensors to the host\."


def run(stage, model, make_trainer, *callbacks, on_leak="warn", **arguments):
    """What the detector finds in a stage: its stage, and the leak."""
    detector = LeakDetector(**DETECTOR, on_leak=on_leak)
    trainer = make_trainer(callbacks=[detector, *callbacks], **{"max_epochs": 5, "inference_mode": False, **arguments})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        getattr(trainer, stage)(model)
    return detector.leaks


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    leaky.KEPT.clear()


PLANTED = {
    "list of losses": (
        leaky.Losses,
        rf"self\.losses: a list of \d+ items, \d+ with their autograd graph.* {WITH_GRAPH}",
    ),
    "cached outputs": (leaky.Outputs, rf"self\.cache: a dict of \d+ items\. {WITHOUT}"),
    "metric": (leaky.Metric, r"self\.scores\.value: list state of a metric, \d+ items\. reset\(\) was not called\. .*"),
    "metric with graphs": (
        leaky.MetricWithGraphs,
        r"self\.scores\.value: list state of a metric, \d+ items, with autograd graph\. "
        r"Call metric\.update\(preds\.detach\(\), \.\.\.\) instead\.",
    ),
    "global list": (leaky.Global, rf"\S*leaky_models\.KEPT: a list of \d+ items\. {WITHOUT}"),
    "closure of a hook": (
        leaky.Hook,
        r"seen, in the closure of Hook\.__init__\.<locals>\.<lambda>\(\) \(.*leaky_models\.py:\d+\) at "
        rf"self\.net\.0\._forward_hooks\[\d+\]: a list of \d+ items, \d+ with their autograd graph.* {WITH_GRAPH}",
    ),
    "sum of losses": (leaky.Total, r"self\.total: a tensor whose autograd graph spans all steps\. .*"),
    "manual optimization": (
        leaky.Manual,
        rf"self\.penalties: a dict of \d+ items, \d+ with their autograd graph.* {WITH_GRAPH}",
    ),
}


@pytest.mark.slow_except("list of losses")
@pytest.mark.parametrize("name", PLANTED)
def test_named(name, make_trainer):
    model, expected = PLANTED[name]
    leaks = run("fit", model(), make_trainer)
    assert [stage for stage, _ in leaks] == ["train"]  # once
    for holder in leaks[0][1].holders:
        assert re.fullmatch(expected, str(holder)), str(holder)
    assert leaks[0][1].holders


@pytest.mark.slow
def test_views_in_a_metric_keep_graphs_in_the_first_epoch(make_trainer):
    model = leaky.Curve()
    rows = [torch.randn(leaky.NUM_ROWS, leaky.WIDTH) for _ in range(60)]
    model.train_dataloader = lambda: DataLoader(rows, batch_size=None)
    ((_, leak),) = run("fit", model, make_trainer, max_epochs=1)
    assert [(holder.path, holder.has_graph) for holder in leak.holders] == [("self.auroc.preds", True)]
    assert leak.holders[0].text.startswith("list state of a metric")


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_that_keeps_graphs_is_told_and_what_it_collects_if_memory_would_run_out(
    stage, make_trainer, monkeypatch
):
    ((kind, leak),) = run(stage, leaky.Evaluation(with_graph=True), make_trainer)
    assert kind == stage
    expected = rf"self\.outputs: a list of \d+ items, \d+ with their autograd graph.* {WITH_GRAPH}"
    assert re.fullmatch(expected, str(leak.holders[0]))
    assert run(stage, leaky.Evaluation(), make_trainer) == []
    monkeypatch.setattr(callback, "_available_bytes", lambda trainer: leaky.SAVED_COPY_BYTES)
    ((kind, leak),) = run(stage, leaky.Evaluation(), make_trainer)
    assert kind == stage
    assert str(leak.holders[0]).startswith("self.outputs: a list of")


def test_an_evaluation_raises_at_its_end(make_trainer):
    model = leaky.Evaluation(with_graph=True)
    with pytest.raises(MemoryLeakError, match=r"^LeakDetector: memory grows with the test steps\. "):
        run("test", model, make_trainer, on_leak="raise")
    assert len(model.outputs) == 30


def test_a_callback_is_named_by_its_class(make_trainer):
    ((stage, leak),) = run("fit", leaky.Plain(), make_trainer, leaky.Keeper())
    assert (stage, leak.tensor_bytes) == ("train", leaky.SAVED_COPY_BYTES)
    assert [holder.path for holder in leak.holders] == ["Keeper.batches"]


def test_outputs_of_validations_that_stay(make_trainer):
    ((stage, leak),) = run("fit", leaky.Validation(), make_trainer, val_check_interval=3)
    assert (stage, leak.tensor_bytes) == ("validate", leaky.SAVED_COPY_BYTES)
    assert [holder.path for holder in leak.holders] == ["self.outputs"]


def test_size_and_origin_are_exact_and_a_leak_below_the_least_size_is_none(make_trainer, monkeypatch):
    ((_, leak),) = run("fit", leaky.Outputs(), make_trainer)
    assert leak.tensor_bytes == leaky.SAVED_COPY_BYTES
    assert leaky.SAVED_COPY_BYTES <= leak.bytes_per_step < 2 * leaky.SAVED_COPY_BYTES
    ((line, num_bytes),) = leak.sites
    assert num_bytes == leaky.SAVED_COPY_BYTES
    assert re.fullmatch(r".*leaky_models\.py:\d+ in hidden", line)
    assert str(leak).splitlines()[-1] == f"  allocated in {line}: 8.00 KiB"
    monkeypatch.setitem(DETECTOR, "min_bytes_per_step", 16 * leaky.SAVED_COPY_BYTES)
    assert run("fit", leaky.Outputs(), make_trainer) == []


def test_named_where_memory_is_not_counted(make_trainer, monkeypatch):
    monkeypatch.setattr("lightning_vram.memory.leaks.LiveBytes.read", lambda self: {})
    ((_, leak),) = run("fit", leaky.Losses(), make_trainer)
    assert [holder.path for holder in leak.holders] == ["self.losses"]


def test_warns_with_the_step(make_trainer):
    detector = LeakDetector(**DETECTOR)
    message = r"^LeakDetector: memory grows with the training steps, at step \d+\. .* per step, 4 B of it in tensors"
    with pytest.warns(UserWarning, match=message):
        make_trainer(callbacks=[detector], max_epochs=5).fit(leaky.Losses())
