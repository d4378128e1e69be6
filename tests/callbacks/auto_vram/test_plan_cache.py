"""A run whose step is like that of an earlier one takes its plan, if all else that it depends on is the same."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.helpers import assert_equal_weights
from support.planned_models import LitGPT
from support.plans import IN_PARTS, checkpointing, measured, tried
from torch import nn

from lightning_vram import AutoVRAM, MicroBatching
from lightning_vram.callbacks.auto_vram import decision
from lightning_vram.callbacks.auto_vram.decision import load_plan, plan_folder, plan_key, save_plan
from lightning_vram.estimation.running_trainer import RunningTrainer
from lightning_vram.estimation.step_time import StepTime
from lightning_vram.estimation.traced_fit import FitRun
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.planner.scheme import Found, Measured

TIGHT = int(0.9 * 9.28 * MIB)  # of 9.28 MiB that a step of two layers needs


@pytest.fixture
def plan(fit, caplog) -> Callable[..., tuple[LitGPT, str, str]]:
    """Fit a new model; returns it, what was done, and what was said."""
    caplog.set_level(logging.INFO, "lightning.pytorch")

    def run(*args: Any, **options: Any) -> tuple[LitGPT, str, str]:
        caplog.clear()
        auto, schemes = AutoVRAM(*args, **options), []
        auto.on_train_start = lambda trainer, pl_module: schemes.append(str(auto.scheme))
        model = fit(partial(LitGPT, num_layers=2), auto)
        return model, schemes[0], "\n".join(record.getMessage() for record in caplog.records)

    return run


@pytest.mark.slow
def test_the_next_run_takes_the_plan_and_traces_the_step_alone(plan, monkeypatch, tmp_path):
    plain, scheme, said = plan(TIGHT)
    (path,) = tmp_path.glob("auto_vram/*")
    assert path.suffix == ".json"
    assert "earlier run" not in said
    monkeypatch.setattr(decision.TracedSteps, "search", None)
    packed, again, said = plan(TIGHT)
    assert again == scheme
    assert "ActivationCheckpointing(budget=" in scheme
    assert f"\nThe plan was reused from an earlier run, {path}: cache=False makes a new one." in said
    assert_equal_weights(plain, packed)
    before = path.stat().st_mtime_ns
    with pytest.warns(UserWarning, match="AutoVRAM cannot plan this run"):  # a search, which there is none of here
        plan(TIGHT, cache=False)
    assert list(tmp_path.glob("auto_vram/*")) == [path]
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"budget_bytes": 1, "best": 9, "plain": 0, "tried": []}', b"\xff\xfe"])
def test_a_file_that_is_no_plan_is_ignored_in_one_line(tmp_path, caplog, text):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    path = tmp_path / "plan.json"
    path.write_bytes(text)
    assert load_plan(path, GIB) is None
    assert caplog.messages[-1].startswith(f"AutoVRAM: cached plans are not used, {path}: ")


def test_a_plan_runs_no_code_of_others(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    path = tmp_path / "plan.json"
    save_plan(path, Found(tried()[0], tried()[0], tried()), 4 * GIB)
    path.write_text(path.read_text().replace("lightning_vram.MicroBatching", "os.system"))
    assert load_plan(path, 4 * GIB) is None
    assert caplog.messages[-1].endswith(f"{path}: ValueError: 'os.system' is not a class of lightning_vram.")


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    (tmp_path / "auto_vram").write_text("a file")
    path = tmp_path / "auto_vram" / "plan.json"
    save_plan(path, Found(tried()[0], tried()[0], tried()), GIB)
    assert caplog.messages[-1].startswith(f"AutoVRAM: cached plans are not used, {path}: ")


def found_of(*some: Any) -> Found:
    timed = replace(some[1], time=StepTime(1.0, to_card=0.5, backward=StepTime(0.5)), peak="in the forward", layers="a")
    return Found(timed, some[0], (some[0], timed, *some[2:]))


def test_all_that_was_tried_comes_back_so_that_the_plan_can_be_corrected(tmp_path):
    path, budget = tmp_path / "plan.json", 2 * GIB
    offload = replace(checkpointing("1MiB"), init_args={"budget": "1MiB", "remedies": ["recompute", "offload"]})
    found = found_of(*tried(), measured(IN_PARTS, offload, mib=5, ms=9))
    save_plan(path, found, budget)
    again = load_plan(path, budget)
    assert again == found
    assert again.tried[1] is again.best
    assert decision.tighter_scheme(again.best.scheme, again, may_checkpoint=False) == decision.tighter_scheme(
        found.best.scheme, found, may_checkpoint=False
    )


@pytest.mark.parametrize(
    ("budget_bytes", "is_taken"), [(999 * MIB, False), (1000 * MIB, True), (2200 * MIB, True), (2201 * MIB, False)]
)
def test_a_plan_is_for_budgets_that_it_fits_and_that_are_not_much_larger(tmp_path, budget_bytes, is_taken):
    path, found = tmp_path / "plan.json", Found(tried()[1], tried()[0], tried())  # the best needs 1000 MiB
    save_plan(path, found, 2000 * MIB)
    assert (load_plan(path, budget_bytes) is not None) == is_taken


def test_plans_are_beside_the_folders_of_runs(make_trainer, tmp_path):
    assert plan_folder(make_trainer()) == tmp_path / "auto_vram"
    logger = CSVLogger(tmp_path / "logs")
    assert plan_folder(make_trainer(logger=logger)) == tmp_path / "logs" / "auto_vram"
    assert plan_folder(make_trainer(default_root_dir="memory://bucket")) is None
    assert plan_folder(make_trainer(fast_dev_run=True)) is None  # writes nothing


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)


def run_of(module: pl.LightningModule | None = None, **changes: Any) -> RunningTrainer:
    callbacks = changes.pop("callbacks", [MicroBatching(2)])
    fit = FitRun({"callbacks": callbacks, "strategy": "auto"}, num_ranks=changes.pop("num_ranks", 1))
    run = RunningTrainer(module or Net(), torch.zeros(8, 4), DeviceSpec("cpu", 1000), fit, 1, (32,), 4)
    return replace(run, **changes)


def key_of(run: RunningTrainer, plain: Measured | None = None, asked: tuple[Any, ...] = ("auto", "EXACT")) -> str:
    return plan_key(run, plain or tried()[0], asked)


def test_each_change_of_a_run_has_a_key_of_its_own(monkeypatch):
    frozen = Net()
    frozen.first.bias.requires_grad_(requires_grad=False)
    keys = [
        key_of(run_of()),
        key_of(run_of(), replace(tried()[0], time=StepTime(0.1001))),
        key_of(run_of(), replace(tried()[0], needed_bytes=1)),
        key_of(run_of(), asked=("1GiB", "EXACT")),
        key_of(run_of(), asked=("auto", "ANY")),
        key_of(run_of(frozen)),
        key_of(run_of(Net().bfloat16())),
        key_of(run_of(callbacks=[])),
        key_of(run_of(num_ranks=2)),
        key_of(run_of(num_devices=2)),
    ]
    monkeypatch.setattr(decision, "__version__", "9.9")
    keys.append(key_of(run_of()))
    assert len(set(keys)) == len(keys)


def test_what_varies_from_run_to_run_has_no_part_in_it():
    watched = run_of(callbacks=[MicroBatching(2), AutoVRAM()], device=DeviceSpec("cpu", 999))
    assert key_of(watched) == key_of(run_of())
