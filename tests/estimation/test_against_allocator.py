"""Estimates beside what PyTorch's own allocator had: recorded, of whole runs of the Trainer."""

import warnings

import pytest
import torch

from tests.benchmarks.estimates.measure import estimate
from tests.benchmarks.estimates.recorded import device_of, read_rows

ROWS = {f"{row['name']}, {row['torch']}": row for row in read_rows()}
QUICK = [f"small gpt, {way}, 2.15.0+cu132" for way in ("fp32", "bf16-mixed", "clipped", "in parts")]
QUICK.append("small gpt, fp32, 2.11.0+cu130")


@pytest.mark.slow_except(*QUICK)
@pytest.mark.parametrize("name", ROWS)
def test_allocated_bytes_are_those_of_the_allocator(name, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # a deterministic Trainer of another test set it
    row = ROWS[name]
    with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=False):
        warnings.simplefilter("ignore")
        found = estimate(row["name"], device_of(row))
    allocated_error, reserved_error = (0.002, 0.002) if name in QUICK else (0.03, 0.12)  # convolutions without cuDNN
    assert found["allocated_bytes"] == pytest.approx(row["allocated_bytes"], rel=allocated_error)
    assert found["reserved_bytes"] == pytest.approx(row["reserved_bytes"], rel=reserved_error)
