"""The table in the docstring, counted."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.optimizers.bf16_weights import LeanParameters

NUM_LAYERS = 4
WIDTH = 64
NUM_PARAMETERS = NUM_LAYERS * WIDTH * WIDTH
STEP_BYTES = 4 * NUM_LAYERS  # the number of steps, once for each parameter
BYTES = {"bf16+master": 16, "bf16+split": 14, "bf16+kahan": 10, "bf16+stochastic": 8}
# Weights and gradients; with master, before those, two copies to compare and what came of it; with narrow states
# wide ones, and then both in bf16 again.
TRANSIENT_BYTES = {"bf16+master": 7, "bf16+split": 4 + 4, "bf16+kahan": 4 + 8 + 4, "bf16+stochastic": 4 + 8 + 4}


@pytest.mark.parametrize("scheme", BYTES)
def test_bytes_per_parameter_are_those_of_the_table(scheme, monkeypatch):
    monkeypatch.setattr("lightning_vram.optimizers.bf16_weights.CHUNK_ELEMENTS", WIDTH * WIDTH)
    with track_memory() as tracker:
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        lean = LeanParameters(layers.parameters(), scheme)
        optimizer = AdamW(layers.parameters(), fused=True)
        lean.attach([optimizer])
        for parameter in layers.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert tracker.timeline.live_bytes == BYTES[scheme] * NUM_PARAMETERS + STEP_BYTES
    with track_memory(layers, optimizers=[optimizer]) as tracker:
        before = tracker.timeline.live_bytes
        optimizer.step()
        assert tracker.timeline.live_bytes == before
    peak_bytes = tracker.timeline.peak_by_phase[Phase.OPTIMIZER_STEP] - before
    assert peak_bytes == TRANSIENT_BYTES[scheme] * WIDTH * WIDTH  # of one layer, not of four


def test_a_checkpoint_needs_no_device_memory_and_no_more_of_the_host_than_it_keeps(monkeypatch):
    monkeypatch.setattr("lightning_vram.optimizers.bf16_weights.CHUNK_ELEMENTS", WIDTH * WIDTH)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
    lean = LeanParameters(layers.parameters(), "bf16+split")
    with track_memory() as tracker:
        full = lean.full_state(layers.state_dict())
        assert tracker.timeline.live_bytes == 4 * NUM_PARAMETERS
    assert tracker.timeline.peak_bytes == 4 * NUM_PARAMETERS + 4 * WIDTH * WIDTH
    assert len(full) == NUM_LAYERS


@pytest.mark.parametrize(("scheme", "host_bytes"), [("bf16+master", 4), ("bf16+split", 2), ("bf16+kahan", 2)])
def test_frozen_parameters_cost_two_bytes_of_the_device_and_a_few_of_the_host(scheme, host_bytes):
    with track_memory() as tracker:
        layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
        lean = LeanParameters(layer.parameters(), scheme)
        assert tracker.timeline.live_bytes == (2 + host_bytes) * WIDTH * WIDTH
    assert lean._chunks[0].rest.device.type == "cpu"
