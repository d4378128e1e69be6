"""Forwards of models of the usual kinds keep and need, on the stand-in, what they do under CUDA's own dispatcher.

The numbers were recorded by ``support/cuda_parity.py`` with torch 2.15.0+cu132; 2.11.0+cu130 gives the same.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from support.cuda_parity import measure
from support.cuda_parity_models import MODELS
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_vram.memory.estimate.cuda_semantics import cuda_semantics

CARD = torch.device("lazy", 0)
RECORD = json.loads((Path(__file__).parent / "parity.json").read_text())


@pytest.mark.parametrize(("name", "precision"), list(itertools.product(MODELS, ["fp32", "bf16"])))
def test_a_forward_keeps_and_needs_what_it_does_under_cudas_dispatcher(name, precision):
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_semantics((8, 9)):
        saved_and_peak = measure(name, precision, CARD, lambda dtype: torch.autocast("cuda", dtype))
    assert saved_and_peak == RECORD[f"{name}-{precision}"]
