"""Checkpointing on an accelerator: attention that draws random numbers there, streams, the allocator."""

import copy
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from support.devices import DEVICE, at_size, requested_bytes
from torch import Tensor, nn

from lightning_vram.techniques.activation_checkpointing.apply import (
    BudgetedCheckpointing,
    apply_activation_checkpointing,
)
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

pytestmark = pytest.mark.device


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(64, 4, 256, dropout=0.2, batch_first=True, norm_first=True) for _ in range(4))
    return nn.Sequential(*layers).to(DEVICE)


def train(model: nn.Module, hidden: Tensor, around: AbstractContextManager[object]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    for _ in range(3):
        with torch.autocast(DEVICE, torch.bfloat16), around:
            loss = model(hidden).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.usefixtures("deterministic_kernels")
@pytest.mark.parametrize("save", [None, "matmuls", pytest.param("attention", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_fused_attention_with_dropout_trains_the_same(save, is_offloaded):
    model, hidden = make_model(), torch.randn(8, 128, 64, device=DEVICE)
    twin = copy.deepcopy(model)
    handle = apply_activation_checkpointing(twin, save=SavePolicy(save) if save is not None else None)
    offloading = ActivationOffloading(twin, min_offload_bytes=1024) if is_offloaded else nullcontext()
    assert all(map(torch.equal, train(twin, hidden, offloading), train(model, hidden, nullcontext())))
    if save is not None:
        assert handle.num_saved_results() > 0


def test_a_budget_holds_in_the_allocator():
    model, hidden = make_model(), torch.randn(at_size(64, 4), at_size(512, 256), 64, device=DEVICE)

    def step() -> int:
        before = requested_bytes()
        loss = model(hidden).square().mean()
        kept = requested_bytes() - before
        loss.backward()
        model.zero_grad(set_to_none=False)
        return kept

    step()
    plain_bytes = step()
    budgeted = BudgetedCheckpointing(model, apply_activation_checkpointing(model), plain_bytes // 2)
    with budgeted.observing(hidden):
        loss = model(hidden).square().mean()
    loss.backward()
    del loss
    model.zero_grad(set_to_none=False)
    budgeted.apply(budgeted.plan().decisions)
    step()
    assert step() <= 0.52 * plain_bytes


class ByKeyword(nn.Linear):
    """Gets its tensors inside a dict: torch's checkpoint would not find the device to keep random numbers of."""

    def forward(self, *, state: dict) -> Tensor:
        return torch.tanh(super().forward(nn.functional.dropout(state["hidden"], 0.5)))


def test_dropout_masks_are_the_same_when_tensors_come_by_keyword():
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        net = nn.ModuleList([ByKeyword(16, 16), ByKeyword(16, 16)]).to(DEVICE)
        if is_checkpointed:
            apply_activation_checkpointing(net)
        hidden = torch.randn(8, 16, device=DEVICE)
        for layer in net:
            hidden = layer(state={"hidden": hidden})
        hidden.sum().backward()
        gradients.append([p.grad for p in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
