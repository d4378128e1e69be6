"""Plans for a byte budget: what is predicted is what is tracked, and nothing else changes."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.helpers import assert_equal_weights
from support.networks import make_network
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_vram import track_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.techniques.activation_checkpointing.apply import (
    BudgetedCheckpointing,
    apply_activation_checkpointing,
)
from lightning_vram.techniques.activation_checkpointing.budget_plan import BudgetError, CheckpointPlan

SCALARS = 8192  # what a plan adds for the loss and the like


def tracked_step(model: nn.Module, compute_loss, inputs) -> int:
    """Peak of activation bytes of one step."""
    with track_memory(model, inputs=inputs) as tracker:
        compute_loss(model).backward()
    return tracker.timeline.peak_of(Category.ACTIVATIONS)


def plan_for(model: nn.Module, compute_loss, inputs, budget_bytes: int) -> tuple[CheckpointPlan, int]:
    """Watch a step, make the plan and apply it; returns it with the peak of the watched step."""
    budgeted = BudgetedCheckpointing(model, apply_activation_checkpointing(model), budget_bytes)
    with track_memory(model, inputs=inputs) as tracker:
        with budgeted.observing(inputs):
            loss = compute_loss(model)
        plan = budgeted.plan()
        budgeted.apply(plan.decisions)
        loss.backward()
    return plan, tracker.timeline.peak_of(Category.ACTIVATIONS)


def byte_gpt(num_layers: int = 4) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = ByteGPT(num_layers, width=64, num_heads=4, sequence_length=64, dropout=0.1)
    return model, torch.randint(256, (4, 65))


def byte_gpt_loss(tokens: Tensor):
    return lambda model: model._loss(tokens)


@pytest.mark.slow_except("0.5")
@pytest.mark.parametrize("share", [0.5, 0.3])
def test_byte_gpt_uses_its_budget_and_never_more(share):
    model, tokens = byte_gpt(num_layers=8)
    compute_loss = byte_gpt_loss(tokens)
    plain, plain_peak = copy.deepcopy(model), tracked_step(copy.deepcopy(model), compute_loss, tokens)
    budget_bytes = int(share * plain_peak)
    plan, first_peak = plan_for(model, compute_loss, tokens, budget_bytes)
    model.zero_grad()
    assert abs(plan.plain_peak_bytes - plain_peak) <= SCALARS
    assert abs(first_peak - plan.minimum_bytes) <= 128 * 1024  # samples of outputs, and the end of a layer, at first
    assert plan.peak_bytes <= budget_bytes
    for tensors in (model, plain):
        optimizer = torch.optim.AdamW(tensors.parameters(), lr=1e-2)
        torch.manual_seed(3)
        for _ in range(2):
            optimizer.zero_grad()
            peak = tracked_step(tensors, compute_loss, tokens)
            if tensors is model:
                assert 0.9 * budget_bytes <= peak <= budget_bytes
                assert 0.99 * plan.peak_bytes <= peak <= plan.peak_bytes
            optimizer.step()
    assert_equal_weights(model, plain)


@pytest.mark.slow_except("unet")
@pytest.mark.parametrize("name", ["resnet50", "unet", "llama", "densenet121"])
def test_well_known_networks_stay_within_it(name):
    model, inputs = make_network(name)
    inputs = inputs[:1] if inputs.dim() == 2 else inputs[:1, :, ::2, ::2]
    plain_peak = tracked_step(copy.deepcopy(model), lambda model: model(inputs).square().mean(), inputs)
    budget_bytes = int(0.65 * plain_peak)
    plan, _ = plan_for(model, lambda model: model(inputs).square().mean(), inputs, budget_bytes)
    model.zero_grad()
    assert tracked_step(model, lambda model: model(inputs).square().mean(), inputs) <= plan.peak_bytes <= budget_bytes


def test_fake_tensors_give_the_same_plan():
    plans = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            model, tokens = byte_gpt()
            plan, _ = plan_for(model, byte_gpt_loss(tokens), tokens, 4 * 10**6)
        plans.append(plan)
    real, fake = plans
    assert 0 < real.recompute_share < 1
    assert fake.decisions == real.decisions
    assert (fake.peak_bytes, fake.plain_peak_bytes) == (real.peak_bytes, real.plain_peak_bytes)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, hidden: Tensor, other: Tensor | None = None) -> Tensor:
        return hidden + self.down(F.gelu(self.up(hidden if other is None else hidden * other)))


class Net(nn.Module):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class SkipNet(Net):
    """As a U-Net: what goes into the first layers lives until the backward of the last."""

    def forward(self, hidden: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        second = self.layers[1](first)
        third = self.layers[2](second, second)
        return self.layers[3](third, first) * first


class ReusingNet(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            hidden = layer(hidden)
        return hidden


class ActivatedNet(Net):
    """What a layer returns is saved inside of it, too, and overwritten outside."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden).relu_()
        return hidden


class FrozenNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[:2].requires_grad_(False)


@pytest.mark.parametrize("make_model", [SkipNet, ReusingNet, ActivatedNet, FrozenNet])
def test_models_of_all_shapes_stay_within_it(make_model):
    torch.manual_seed(0)
    model, inputs = make_model(), torch.randn(64, 16)

    def compute_loss(model):
        return model(inputs).square().mean()

    plain = copy.deepcopy(model)
    plain_peak = tracked_step(plain, compute_loss, inputs)
    plan, _ = plan_for(model, compute_loss, inputs, int(0.7 * plain_peak))
    model.zero_grad()
    assert tracked_step(model, compute_loss, inputs) <= plan.peak_bytes <= 0.7 * plain_peak
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


def test_the_minimum_that_a_refusal_names_works():
    model, tokens = byte_gpt()
    with pytest.raises(BudgetError) as caught:
        plan_for(model, byte_gpt_loss(tokens), tokens, 1024)
    model, tokens = byte_gpt()
    plan, _ = plan_for(model, byte_gpt_loss(tokens), tokens, caught.value.minimum_bytes)
    model.zero_grad()
    assert tracked_step(model, byte_gpt_loss(tokens), tokens) <= caught.value.minimum_bytes == plan.peak_bytes


def test_a_step_with_two_backwards_is_planned_for_the_larger_forward():
    model, inputs = nn.ModuleDict({"first": Net(2), "second": Net(4)}), torch.randn(64, 16)
    handle = apply_activation_checkpointing(model, layers="Layer")
    budgeted = BudgetedCheckpointing(model, handle, 10**9)
    with budgeted.observing(inputs):
        model["first"](inputs).sum().backward()
        model["second"](inputs).sum().backward()
    assert list(budgeted.plan().decisions) == [f"second.layers.{number}" for number in range(4)]
