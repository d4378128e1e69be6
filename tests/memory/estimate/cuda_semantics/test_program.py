"""Programs that name CUDA run unchanged, and keep and need what they do under CUDA's own dispatcher.

The numbers were recorded by ``support/cuda_parity.py`` with torch 2.15.0+cu132; 2.11.0+cu130 gives the same.
"""

import itertools
import json
from pathlib import Path

import pytest
import torch
from support.cuda_parity import measure
from support.cuda_parity_models import MODELS
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_vram.memory.estimate.cuda_semantics import cuda_semantics

CARD = torch.device("lazy", 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3).cuda(0),
        lambda: torch.empty(3).to("cuda", non_blocking=True),
        lambda: torch.empty(3).to(torch.device("cuda", 0), torch.float16),
        lambda: torch.arange(3, device=torch.device("cuda")),
        lambda: torch.tensor([1.0, 2.0], device="cuda"),
        lambda: torch.as_tensor(3, device="cuda:0"),
        lambda: torch.zeros(3).new_ones(2, device="cuda"),
        lambda: torch.randn(3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1)),
        lambda: nn.BatchNorm1d(3, device="cuda").num_batches_tracked,
        lambda: torch.empty(3).pin_memory().cuda(),
        lambda: torch.empty(3, pin_memory=True).to("cuda"),
    ],
)
def test_cuda_is_the_stand_in(card, make):
    card()
    tensor = make()
    assert tensor.device == CARD
    assert tensor.is_cuda


def test_torch_cuda_speaks_of_the_card():
    with cuda_semantics((7, 5), num_bytes=1000, allocated_bytes=lambda: 300):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.manual_seed_all(3)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        assert torch.cuda.is_available()
        assert torch.cuda.memory_allocated() == 300
        assert torch.cuda.mem_get_info() == (700, 1000)
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.get_device_properties(0).total_memory == 1000
        assert not torch.cuda.is_bf16_supported(including_emulation=False)


RECORD = json.loads((Path(__file__).parent / "parity.json").read_text())


@pytest.mark.quick_sample(10)
@pytest.mark.parametrize(("name", "precision"), list(itertools.product(MODELS, ["fp32", "bf16"])))
def test_a_forward_keeps_and_needs_what_it_does_under_cudas_dispatcher(name, precision):
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_semantics((8, 9)):
        saved_and_peak = measure(name, precision, CARD, lambda dtype: torch.autocast("cuda", dtype))
    assert saved_and_peak == RECORD[f"{name}-{precision}"]
