"""Moments in fewer bytes between steps train as well as those in float32."""

from statistics import mean
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from lightning_vram.demos import ByteGPT, SourceText
from lightning_vram.optimizers.stepping import StateForm, find_form, narrow_state, widen_state

NUM_STEPS, NUM_LAST = 200, 20
SEEDS = range(3)


def at_rest(form: StateForm, state: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a state as it is read again after it was kept."""
    flat = {key: value.view(-1) if value.dim() else value for key, value in state.items()}
    narrow = narrow_state(form, flat, 0, f"{int(state['step'])} {number}")
    kept = {
        key: form.empty(key, value.shape).copy_(narrow[key].view(value.shape)) if value.dim() else value
        for key, value in state.items()
    }
    return widen_state(kept)


def last_losses(name: Any, seed: int) -> list[float]:
    """Train a small model, with moments at rest between its steps; what ``fsdp_offload`` does is tested elsewhere."""
    torch.manual_seed(seed)
    model = ByteGPT(num_layers=2, width=32, num_heads=2, sequence_length=32, dropout=0.0)
    data = SourceText(batch_size=8, sequence_length=32, num_train_bytes=200_000)
    data.setup("fit")
    optimizer, form, losses = AdamW(model.parameters(), 3e-3), find_form(name), []
    for _, batch in zip(range(NUM_STEPS), data.train_dataloader(), strict=False):
        logits = model(batch[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if form is not None:
            for number, (parameter, state) in enumerate(optimizer.state.items()):
                optimizer.state[parameter] = at_rest(form, state, number)
    assert len(losses) == NUM_STEPS
    return losses[-NUM_LAST:]


@pytest.mark.slow
def test_the_loss_is_that_of_float32() -> None:
    # A single seed's loss says little: float32 runs whose weights were perturbed by 0.1 % differ by as much as those of
    # bf16, up to 0.9 % either way. So the mean over seeds is held to the bounds, and to be better is no error.
    loss = {name: mean(mean(last_losses(name, seed)) for seed in SEEDS) for name in ("fp32", "bf16", "8bit")}
    assert loss["bf16"] <= 1.005 * loss["fp32"], loss
    assert loss["8bit"] <= 1.02 * loss["fp32"], loss
