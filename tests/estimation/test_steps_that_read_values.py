"""Steps that read values of tensors are estimated, planned and run in less memory like any other."""

import re
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import assert_equal_weights
from support.value_reading_programs import PROGRAMS
from torch.utils.data import DataLoader

from lightning_vram import AutoVRAM, VRAMMonitor
from lightning_vram.estimation import estimate_memory
from lightning_vram.estimation.traced_fit import FitRun, trace_real_fit
from lightning_vram.memory.units import format_bytes, parse_bytes
from lightning_vram.planner import PlanError, plan_memory

NAMES = sorted(PROGRAMS)
NUM_STEPS, WORST, MEAN = 3, 0.05, 0.01


def make(name: str) -> tuple[pl.LightningModule, dict[str, torch.Tensor]]:
    make_module, make_batch = PROGRAMS[name]
    pl.seed_everything(0, verbose=False)
    return make_module(), make_batch()


@pytest.fixture(autouse=True)
def _has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy a search may last for longer than it is given."""
    monkeypatch.setattr("lightning_vram.callbacks.auto_vram.decision._LEAST_SECONDS", 3600.0)


@cache
def real_peak_bytes(name: str) -> int:
    """Return what is tracked over real steps."""
    return trace_real_fit(*make(name), FitRun({})).stage("train").peak_bytes


@cache
def relative_error(name: str) -> float:
    """Return how far an estimate is from real steps."""
    return estimate_memory(*make(name), device="cpu", find_limits=False).peak_bytes / real_peak_bytes(name) - 1


@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_is_near_real_steps(name):
    assert abs(relative_error(name)) <= WORST, f"{relative_error(name):+.1%} of {format_bytes(real_peak_bytes(name))}"


@pytest.mark.slow
def test_the_mean_error_is_small():
    errors = {name: abs(relative_error(name)) for name in NAMES}
    worst = ", ".join(f"{name} {error:.1%}" for name, error in sorted(errors.items(), key=lambda one: -one[1])[:8])
    assert sum(errors.values()) / len(errors) <= MEAN, f"worst: {worst}"


def fit(make_trainer, name: str, *callbacks: Callback) -> tuple[pl.LightningModule, int]:
    """Return the trained module, and its tracked peak."""
    module, batch = make(name)
    monitor = VRAMMonitor(track=True, path=None)
    trainer = make_trainer(callbacks=[*callbacks, monitor], max_epochs=1)
    trainer.fit(module, DataLoader([batch] * NUM_STEPS, batch_size=None))
    return module, monitor.peaks["train"].peak_allocated_bytes


def minimum_named_by(error: MisconfigurationException) -> int:
    found = re.search(r"The minimum found is .*What helps: budget='(\S+)'", str(error))
    assert found, f"The refusal does not name the minimum: {error}"
    return parse_bytes(found[1])


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("name", NAMES)
def test_auto_vram_keeps_half_of_the_memory_or_the_minimum_that_it_names(name, make_trainer):
    baseline, baseline_bytes = fit(make_trainer, name)
    budget_bytes = baseline_bytes // 2
    try:
        optimized, peak_bytes = fit(
            make_trainer, name, AutoVRAM(f"{budget_bytes}B")
        )  # that it cannot plan is an error here
    except MisconfigurationException as error:
        budget_bytes = minimum_named_by(error)
        optimized, peak_bytes = fit(make_trainer, name, AutoVRAM(f"{budget_bytes}B"))
    peak, budget, before = map(format_bytes, (peak_bytes, budget_bytes, baseline_bytes))
    assert peak_bytes <= budget_bytes, f"{peak} with a budget of {budget}; baseline: {before}"
    assert_equal_weights(baseline, optimized)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_plan_memory_plans_half_of_the_memory_or_names_the_minimum(name):
    budget_bytes = real_peak_bytes(name) // 2
    try:
        plan = plan_memory(*make(name), device="cpu", budget=f"{budget_bytes}B")
    except PlanError as error:
        budget_bytes = error.minimum_bytes
        plan = plan_memory(*make(name), device="cpu", budget=f"{budget_bytes}B")
    assert plan.peak_bytes <= budget_bytes
    assert abs(plan.found.plain.needed_bytes / real_peak_bytes(name) - 1) <= WORST


def test_there_are_thirty_programs_at_least():
    assert len(PROGRAMS) >= 30
