"""Foreign training code with our features, against the same run without: weights, logs and predictions."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from foreign_code import programs
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from torch.utils._pytree import tree_leaves

from lightning_vram import (
    AccumulationScheduler,
    ActivationCheckpointing,
    ActivationCompression,
    ActivationOffload,
    EarlyRelease,
    EmptyCache,
    FSDPOffloadStrategy,
    InPlaceFusion,
    LeanMixedPrecision,
    MicroBatching,
    VRAMMonitor,
)
from lightning_vram.core.batches.splitting import BatchSplitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:ActivationOffload"),  # from host memory to host memory
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log"),  # Lightning, of any strategy with ranks
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:MicroBatching.'auto'. cannot split this batch"),  # joined graphs
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # of callbacks that are gone
]
PROGRAMS = [programs.Detection, programs.GraphClassification, programs.TwoTasks, programs.Images]
ALL = [
    lambda: ActivationCheckpointing(every_n_layers=2),
    lambda: ActivationOffload(min_offload_bytes=256),
    lambda: InPlaceFusion(min_bytes=64),
    EarlyRelease,
    EmptyCache,
    lambda: VRAMMonitor(track=True, path=None),
]
FEATURES: dict[str, Callable[[], dict[str, Any]]] = {
    "ActivationCheckpointing": lambda: {"callbacks": [ActivationCheckpointing(save="matmuls")]},
    "ActivationCompression": lambda: {"callbacks": [ActivationCompression(min_bytes=64)]},
    "MicroBatching": lambda: {"callbacks": [MicroBatching()]},  # the whole batch fits
    "fsdp_offload": lambda: {"strategy": FSDPOffloadStrategy(min_params=100)},
    "all": lambda: {"callbacks": [make() for make in ALL]},
}


class Memo(Logger):
    name, version = "memo", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        theirs = {name: value for name, value in metrics.items() if not name.startswith("vram/")}
        if theirs.keys() - {"epoch"}:
            self.lines.append((step, theirs))


Run = Callable[..., tuple[pl.LightningModule, dict[str, Any]]]


@pytest.fixture
def run(make_trainer: Callable[..., pl.Trainer]) -> Run:
    """Fit, and predict where a program does; returns it and all that its owner can see."""

    def train(make: Callable[[], pl.LightningModule], **arguments: Any) -> tuple[pl.LightningModule, dict[str, Any]]:
        path = arguments.pop("ckpt_path", None)
        trainer = make_trainer(**{"logger": Memo(), "log_every_n_steps": 1, "deterministic": False, **arguments})
        pl.seed_everything(0, verbose=False)
        program = make()
        trainer.fit(program, ckpt_path=path)
        seen = {"logged": trainer.logger.lines, **{k: v.detach().clone() for k, v in program.state_dict().items()}}
        if hasattr(program, "predict_loader"):
            seen["predicted"] = tree_leaves(trainer.predict(program, program.predict_loader()))
        return program, seen

    return train


def assert_same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    assert expected["logged"]
    for name, value in expected.items():
        if name == "logged":
            assert [(step, list(line)) for step, line in actual[name]] == [(step, list(line)) for step, line in value]
            ours, theirs = ([list(line.values()) for _, line in seen["logged"]] for seen in (actual, expected))
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        else:
            torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.quick_sample(5)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_logs_and_predictions_are_those_of_the_baseline(program, feature, run):
    assert_same(run(program, **FEATURES[feature]())[1], run(program)[1])


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_in_bf16_they_are_those_of_lightning(program, run):
    _, expected = run(program, precision="bf16-mixed")
    for is_recast in (False, True):
        assert_same(run(program, plugins=[LeanMixedPrecision("bf16", recast_in_backward=is_recast)])[1], expected)


@pytest.mark.parametrize("program", [programs.Detection, programs.TwoTasks])
def test_micro_batches_and_their_metrics_and_predictions_are_those_of_whole_batches(program, run):
    assert_same(run(program, callbacks=[MicroBatching(2, eval=2)])[1], run(program)[1], 1e-4)


def test_equal_accumulation_steps_are_those_of_lightning(run):
    scheduled = run(programs.TwoTasks, callbacks=[AccumulationScheduler(by_epoch={0: 2})])[1]
    assert_same(scheduled, run(programs.TwoTasks, accumulate_grad_batches=2)[1], 1e-5)


def test_graphs_that_were_joined_cannot_be_cut(run):
    message = (
        r"^batch\.edge_index has 2 rows \(int64\[2, \d+\]\), but the batch has \d+ samples \(batch\.x has \d+ rows\)\. "
    )
    with pytest.raises(BatchSplitError, match=message):
        run(programs.GraphClassification, callbacks=[MicroBatching(2)])


@pytest.mark.slow_except("after-fsdp_offload")
@pytest.mark.parametrize("feature", ["fsdp_offload", "all", "MicroBatching"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_is_resumed_may_have_a_feature_before_or_after(when, feature, run, tmp_path):
    def in_two_runs(name, first, second):
        saver = ModelCheckpoint(dirpath=tmp_path / name, save_last=True)
        saving = {"callbacks": [saver, *first.get("callbacks", [])], "enable_checkpointing": True, "max_epochs": 1}
        run(programs.TwoTasks, **{**first, **saving})
        return run(programs.TwoTasks, **second, ckpt_path=tmp_path / name / "last.ckpt")[1]

    arguments = FEATURES[feature]()
    first, second = (arguments, {}) if when == "before" else ({}, arguments)
    assert_same(in_two_runs("tested", first, second), in_two_runs("baseline", {}, {}))


FROM_LIGHTNING = {
    "learning rate": lambda: LearningRateFinder(num_training_steps=8, early_stop_threshold=None),
    "batch size": lambda: BatchSizeFinder(mode="power", steps_per_trial=1, init_val=2, max_trials=2),
    "average": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1),
}


@pytest.mark.slow_except("batch size-fsdp_offload", "average-all")
@pytest.mark.parametrize(
    ("theirs", "feature"),
    [
        *(("learning rate", "fsdp_offload"), ("batch size", "fsdp_offload"), ("batch size", "all"), ("average", "all")),
        *(("learning rate", "MicroBatching"), ("batch size", "MicroBatching"), ("average", "ActivationCompression")),
    ],
)
def test_lightnings_tuners_and_averages_find_the_same(theirs, feature, run):
    arguments = FEATURES[feature]()
    callbacks = [FROM_LIGHTNING[theirs](), *arguments.pop("callbacks", [])]
    tuned, actual = run(programs.Images, callbacks=callbacks, max_epochs=3, **arguments)
    baseline, expected = run(programs.Images, callbacks=[FROM_LIGHTNING[theirs]()], max_epochs=3)
    assert (tuned.lr, tuned.batch_size) == (baseline.lr, baseline.batch_size)
    assert_same(actual, expected)
