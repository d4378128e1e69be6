"""Models that others have made: estimates are within 5 % of real steps, and no search for limits ends in an error."""

import importlib.util
from typing import Any

import pytest
import torch
from estimation.test_architectures import LitModel
from support.hf_models import MODELS
from support.more_models import MORE, TIMM, timm_model

from lightning_vram.estimation import estimate_memory
from lightning_vram.estimation.traced_fit import FitRun, trace_real_fit

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CASES = {**MODELS, **MORE, **{f"timm {name}": timm_model(name) for name in TIMM if importlib.util.find_spec("timm")}}
WORST, MEAN = 0.05, 0.005


def estimate_beside_real_steps(name: str, *, find_limits: bool) -> tuple[Any, int]:
    """Return the estimate of a model on the host, and the peak that is tracked over its real steps."""
    make_model, make_batch = CASES[name]
    torch.manual_seed(0)
    module, batch = LitModel(make_model().train()), make_batch(4)
    estimate = estimate_memory(module, batch, device="cpu", find_limits=find_limits)
    return estimate, trace_real_fit(module, batch, FitRun({})).stage("train").peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_model_that_others_have_made(name):
    estimate, peak_bytes = estimate_beside_real_steps(name, find_limits=True)
    assert abs(estimate.peak_bytes - peak_bytes) <= WORST * peak_bytes
    if estimate.sequence_length_refusal:
        assert 16 <= estimate.max_sequence_length <= 77  # rows of the tables of positions, of which CLIP has the most


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_mean_error_is_small():
    errors = []
    for name in sorted({*MODELS, *MORE})[::2][:30]:
        estimate, peak_bytes = estimate_beside_real_steps(name, find_limits=False)
        errors.append(abs(estimate.peak_bytes / peak_bytes - 1))
    assert len(errors) == 30
    assert sum(errors) / len(errors) <= MEAN


def test_enough_of_them():
    assert len({*MODELS, *MORE, *TIMM}) >= 90
