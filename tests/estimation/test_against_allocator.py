"""Estimates beside what PyTorch's own allocator had: recorded, of whole runs of the Trainer."""

import warnings
from itertools import groupby
from operator import itemgetter

import pytest
import torch

from lightning_vram.estimation.estimate import estimate_stages
from lightning_vram.estimation.traced_fit import FitRun, trace_fit
from lightning_vram.memory.estimate.workspaces import workspaces_of
from tests.benchmarks.estimates.cases import CASES
from tests.benchmarks.estimates.recorded import device_of, read_rows

NAME = itemgetter("name")
ROWS = {name: list(rows) for name, rows in groupby(sorted(read_rows(), key=NAME), key=NAME)}
# Recorded before ActivationCheckpointing gave kept results up as the backward used them (commit 089d5857): estimates of
# the code before it were these bytes to 0.05 %, of the code since are up to 7.5 % lower. To be recorded anew.
OLDER = "matmuls kept"
QUICK = [f"small gpt, {way}" for way in ("fp32", "bf16-mixed", "clipped", "in parts")]


@pytest.mark.slow_except(*QUICK)
@pytest.mark.parametrize("name", ROWS)
def test_allocated_and_reserved_bytes_are_those_of_the_allocator(name, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # set for all tests on a device
    case, rows = CASES[name], ROWS[name]
    run = FitRun(case.make_options(), device_of(rows[0]), with_validation=False)
    with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=False):
        warnings.simplefilter("ignore")
        traced = trace_fit(case.make_module(), case.model.make_batch(), run)
    allocated_error, reserved_error = (0.002, 0.03) if name in QUICK else (0.03, 0.12)  # convolutions without cuDNN
    assert len(rows) == 2
    for row in rows:
        found = estimate_stages(traced, workspaces_of(device_of(row)))["train"]
        if name.endswith(OLDER):
            assert 0.92 <= found.allocated_bytes / row["allocated_bytes"] <= 1.002, row["torch"]
            continue
        assert found.allocated_bytes == pytest.approx(row["allocated_bytes"], rel=allocated_error), row["torch"]
        assert found.reserved_bytes == pytest.approx(row["reserved_bytes"], rel=reserved_error), row["torch"]
