"""A run like an earlier one takes its plan; whatever a plan depends on is part of the key."""

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from support.helpers import assert_equal_weights
from support.plans import IN_PARTS, checkpointing, measured, tried
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import AutoVRAM, MicroBatching
from lightning_vram.callbacks.auto_vram import decision, plan_cache
from lightning_vram.callbacks.auto_vram.plan_cache import load_plan, plan_folder, plan_key, save_plan
from lightning_vram.demos import ByteGPT
from lightning_vram.estimation.running_trainer import RunningTrainer
from lightning_vram.estimation.step_time import StepTime
from lightning_vram.estimation.traced_fit import FitRun
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.planner.scheme import Found

TIGHT, WIDE = int(0.9 * 16.78 * MIB), "1GiB"  # of 16.78 MiB that a step needs


class LitGPT(ByteGPT):
    def __init__(self) -> None:
        super().__init__(num_layers=4, width=64, num_heads=2, sequence_length=64)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randint(256, (16, 65), generator=torch.Generator().manual_seed(0)), batch_size=8)

    val_dataloader = train_dataloader


@pytest.fixture
def fit(make_trainer, caplog) -> Callable[..., tuple[LitGPT, str, str]]:
    """Fit a new model; returns it, what was done, and what was said."""
    caplog.set_level(logging.INFO, "lightning.pytorch")

    def run(*args: Any, model: type[LitGPT] = LitGPT, **options: Any) -> tuple[LitGPT, str, str]:
        caplog.clear()
        pl.seed_everything(0, verbose=False)
        module, auto, schemes = model(), AutoVRAM(*args, **options), []
        auto.on_train_start = lambda trainer, pl_module: schemes.append(str(auto.scheme))
        make_trainer(callbacks=[auto], max_epochs=1, limit_val_batches=0).fit(module)
        return module, schemes[0], "\n".join(record.getMessage() for record in caplog.records)

    return run


@pytest.mark.parametrize("budget", [TIGHT, "auto"])
def test_the_next_run_takes_the_plan_and_traces_nothing(fit, monkeypatch, tmp_path, budget):
    plain, scheme, said = fit(budget)
    (path,) = tmp_path.glob("auto_vram/*")
    assert path.suffix == ".json"
    assert "earlier run" not in said
    monkeypatch.setattr(decision, "TracedSteps", None)
    packed, again, said = fit(budget)
    assert again == scheme
    assert ("EarlyRelease" in scheme) == (budget == TIGHT)
    assert f"\nThe plan was reused from an earlier run, {path}: cache=False makes a new one." in said
    assert_equal_weights(plain, packed)


def test_without_a_cache_plans_are_neither_written_nor_read(fit, tmp_path):
    fit(WIDE, cache=False)
    assert not (tmp_path / "auto_vram").exists()
    fit(WIDE)
    _, _, said = fit(WIDE, cache=False)
    assert "earlier run" not in said


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"budget_bytes": 1, "best": 9, "plain": 0, "tried": []}',
        b"\xff\xfe",
    ],
)
def test_a_file_that_is_no_plan_is_ignored_in_one_line(fit, tmp_path, text):
    fit(WIDE)
    (path,) = tmp_path.glob("auto_vram/*.json")
    good = path.read_bytes()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    _, scheme, said = fit(WIDE)
    assert scheme == "baseline"
    (line,) = (line for line in said.splitlines() if "are not used" in line)
    assert line.startswith(f"AutoVRAM: cached plans are not used, {path}: ")
    assert path.read_bytes() == good


def test_a_plan_runs_no_code_of_others(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    path = tmp_path / "plan.json"
    save_plan(path, Found(tried()[0], tried()[0], tried()), 4 * GIB)
    path.write_text(path.read_text().replace("lightning_vram.MicroBatching", "os.system"))
    assert load_plan(path, 4 * GIB) is None
    assert caplog.messages[-1].endswith(f"{path}: ValueError: 'os.system' is not a class of lightning_vram.")


def test_a_folder_that_cannot_be_written_to_is_told_and_the_run_goes_on(fit, tmp_path):
    (tmp_path / "auto_vram").write_text("a file")
    _, scheme, said = fit(WIDE)
    assert scheme == "baseline"
    assert f"AutoVRAM: cached plans are not used, {tmp_path / 'auto_vram'}" in said


def test_a_module_that_cannot_be_described_is_planned_without_a_cache(fit, tmp_path):
    class Odd(LitGPT):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd.Bad()

        class Bad:
            __slots__ = ()

            def __repr__(self) -> str:
                raise ZeroDivisionError

    _, scheme, said = fit(WIDE, model=Odd)
    assert scheme == "baseline"
    assert f"are not used, {tmp_path / 'auto_vram'}: " in said


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


def test_a_run_that_fits_as_it_is_fits_more_as_well(tmp_path):
    path, found = tmp_path / "plan.json", Found(tried()[0], tried()[0], tried()[:1])
    save_plan(path, found, 5 * GIB)
    assert load_plan(path, 50 * GIB) == found
    assert load_plan(path, 3 * GIB) is None
    assert load_plan(tmp_path / "none.json", 5 * GIB) is None


def test_plans_are_beside_the_folders_of_runs(make_trainer, tmp_path):
    assert plan_folder(make_trainer()) == tmp_path / "auto_vram"
    logger = CSVLogger(tmp_path / "logs")
    assert plan_folder(make_trainer(logger=logger)) == tmp_path / "logs" / "auto_vram"
    assert plan_folder(make_trainer(default_root_dir="memory://bucket")) is None
    assert plan_folder(make_trainer(fast_dev_run=True)) is None  # writes nothing


class Net(pl.LightningModule):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.second(self.first(batch)).sum()


def run_of(module: pl.LightningModule | None = None, batch: Any = None, **changes: Any) -> RunningTrainer:
    arguments = {"callbacks": [MicroBatching(2)], "strategy": "auto", "accumulate_grad_batches": 1, "plugins": []}
    fit = FitRun(arguments | changes.pop("arguments", {}), run_callbacks=changes.pop("run_callbacks", ()))
    batch = torch.zeros(8, 4) if batch is None else batch
    run = RunningTrainer(module or Net(), batch, DeviceSpec("cpu", 1000), fit, 1, (32,), 4)
    return replace(run, **changes)


def change(apply: Callable[[Net], object]) -> Net:
    module = Net()
    apply(module)
    return module


def _freeze(module: Net) -> None:
    module.first.weight.requires_grad_(requires_grad=False)


def _tie(module: Net) -> None:
    module.first.weight = module.second[0].weight


def _replace_step(module: Net) -> None:
    module.training_step = lambda batch: module.first(batch).sum()


def _configure(module: Net, factor: float) -> None:
    module.configure_optimizers = partial(torch.optim.SGD, lr=factor)


ASKED = ("auto", "EXACT", False)
CHANGES = {
    "a hyperparameter": lambda: run_of(Net(rate=0.2)),
    "a flag": lambda: run_of(change(lambda module: setattr(module, "checkpoints", True))),
    "a flag of a layer": lambda: run_of(change(lambda module: setattr(module.second[1], "p", 0.5))),
    "a frozen weight": lambda: run_of(change(_freeze)),
    "a tied weight": lambda: run_of(change(_tie)),
    "a type": lambda: run_of(Net().bfloat16()),
    "one more buffer": lambda: run_of(change(lambda module: module.register_buffer("ones", torch.ones(1)))),
    "a step of the instance": lambda: run_of(change(_replace_step)),
    "an optimizer of the instance": lambda: run_of(change(partial(_configure, factor=0.1))),
    "a setting of it": lambda: run_of(change(partial(_configure, factor=0.2))),
    "the mode": lambda: run_of(change(lambda module: module.eval())),
    "a batch's shape": lambda: run_of(batch=torch.zeros(9, 4)),
    "a batch's type": lambda: run_of(batch=torch.zeros(8, 4, dtype=torch.int64)),
    "a batch's structure": lambda: run_of(batch=[torch.zeros(8, 4)]),
    "a batch's names": lambda: run_of(batch={"inputs": torch.zeros(8, 4)}),
    "another name": lambda: run_of(batch={"labels": torch.zeros(8, 4)}),
    "accumulation": lambda: run_of(arguments={"accumulate_grad_batches": 2}),
    "precision": lambda: run_of(arguments={"precision": "bf16-mixed"}),
    "no callback": lambda: run_of(arguments={"callbacks": []}),
    "an argument of a callback": lambda: run_of(arguments={"callbacks": [MicroBatching(4)]}),
    "callbacks that are run": lambda: run_of(run_callbacks=("Freeze",)),
    "ranks": lambda: run_of(num_devices=2),
    "a device": lambda: run_of(device=DeviceSpec("cpu", 1000, bandwidth_bytes_per_s=1e12)),
}


def test_each_change_of_a_run_has_a_key_of_its_own():
    keys = {name: plan_key(make(), ASKED) for name, make in ({"nothing": run_of} | CHANGES).items()}
    assert len(set(keys.values())) == len(keys)


@pytest.mark.parametrize("asked", [("1GiB", "EXACT", False), ("auto", "ANY", False), ("auto", "EXACT", True)])
def test_what_is_asked_is_part_of_the_key(asked):
    assert plan_key(run_of(), asked) != plan_key(run_of(), ASKED)


@pytest.mark.parametrize("name", ["__version__", "_MORE_BUDGET"])
def test_versions_are_part_of_the_key(monkeypatch, name):
    before = plan_key(run_of(), ASKED)
    monkeypatch.setattr(plan_cache, name, "9.9")
    assert (plan_key(run_of(), ASKED) != before) == (name == "__version__")


def test_settings_of_torch_are_part_of_the_key(monkeypatch):
    before = plan_key(run_of(), ASKED)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert plan_key(run_of(), ASKED) != before


class Config:
    def __init__(self, size: int, salt: int) -> None:
        self.size, self._salt = size, salt


def test_of_the_objects_of_a_module_public_attributes_are_part_of_the_key():
    made = {(size, salt): change(partial(_give, config=Config(size, salt))) for size in (1, 2) for salt in (1, 2)}
    keys = {name: plan_key(run_of(module), ASKED) for name, module in made.items()}
    assert keys[1, 1] == keys[1, 2] != keys[2, 1] == keys[2, 2]


def test_an_object_that_is_gone_hides_no_other():
    describe = plan_cache._Description()
    assert len({str(describe(Config(size, 0))) for size in range(4)}) == 4  # each is made where the last one was


def _give(module: Net, config: Config) -> None:
    module.config = config


def test_what_varies_from_run_to_run_is_not():
    watch = AutoVRAM()  # takes no memory
    callbacks = [MicroBatching(2), watch]
    texts = [torch.zeros(8, 4), "a file's name"], [torch.zeros(8, 4), "another's"]
    assert plan_key(run_of(arguments={"callbacks": callbacks}), ASKED) == plan_key(run_of(), ASKED)
    assert plan_key(run_of(device=DeviceSpec("cpu", 999)), ASKED) == plan_key(run_of(), ASKED)
    assert plan_key(run_of(batch=texts[0]), ASKED) == plan_key(run_of(batch=texts[1]), ASKED)
    assert plan_key(run_of(batch=torch.ones(8, 4)), ASKED) == plan_key(run_of(), ASKED)


KEY_OF_A_NOTEBOOK = """
import torch
from lightning.pytorch import LightningModule
from lightning_vram import EarlyRelease
from lightning_vram.callbacks.auto_vram.plan_cache import plan_key
from lightning_vram.estimation.running_trainer import RunningTrainer
from lightning_vram.estimation.traced_fit import FitRun
from lightning_vram.memory.estimate.device_spec import DeviceSpec

class Own(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.names = torch.nn.Linear(4, 4), {"a", "b", "c"}
        self.choose = lambda name: name in {"x", "y", "z"}

fit = FitRun({"callbacks": [EarlyRelease()], "strategy": "auto"})
print(plan_key(RunningTrainer(Own(), torch.ones(2, 4), DeviceSpec("cpu", 1), fit, 1, (8,), 4), ()))
"""


@pytest.mark.slow
def test_the_next_process_makes_the_same_key():
    runs = [
        subprocess.run(
            [sys.executable, "-c", KEY_OF_A_NOTEBOOK],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        for seed in ("1", "2")
    ]
    assert len(runs[0].stdout.strip()) == 32
    assert runs[0].stdout == runs[1].stdout


SOURCE = """
import lightning.pytorch as pl
import torch

class Layer(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2

class Own(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = Layer(4, 4)
"""


def _import(path: Path, source: str) -> ModuleType:
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("auto_vram_own_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _execute(path: Path, source: str) -> ModuleType:
    """As a notebook does: the classes have no file."""
    module = ModuleType("auto_vram_own_model")
    sys.modules[module.__name__] = module
    exec(source, vars(module))
    return module


@pytest.mark.parametrize("make", [_import, _execute])
def test_code_of_layers_is_part_of_the_key(tmp_path, monkeypatch, make):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "auto_vram_own_model", None)
    path = tmp_path / "model.py"
    keys = [
        plan_key(run_of(make(path, source).Own()), ASKED)
        for source in (SOURCE, SOURCE, SOURCE.replace("x) * 2", "x) * x"))
    ]
    assert keys[0] == keys[1] != keys[2]
