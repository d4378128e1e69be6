"""Techniques for activations under FSDP2: sharded before or after, whole or in parts, kept unsharded or not."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_vram.techniques.activation_checkpointing.apply import (
    BudgetedCheckpointing,
    apply_activation_checkpointing,
)
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2))
        self.down = nn.Linear(64, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


def shard(model: nn.Sequential, mesh: DeviceMesh, *, reshard: bool) -> None:
    for layer in (model[0].up[0], *model, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)


def train(model: nn.Module, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> dict[str, Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for _ in range(3):
        with around():
            loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    return {name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("save", "is_first", "reshard"),
    [(None, True, True), (SavePolicy("matmuls"), False, True), (SavePolicy("matmuls"), True, False)],
    ids=["before", "after", "kept"],
)
def test_result_is_that_of_the_plain_model(mesh, save, is_first, reshard):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    expected = train(copy.deepcopy(model))
    if is_first:
        handle = apply_activation_checkpointing(model, layers="Block", save=save)
    shard(model, mesh, reshard=reshard)
    if not is_first:
        handle = apply_activation_checkpointing(model, layers="Block", save=save)
    actual = train(model)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    handle.remove()
    train(model)
    apply_activation_checkpointing(model, layers="Block")
    train(model)


class Budget:
    """The first forward is watched, the others run by the plan."""

    def __init__(self, model: nn.Module) -> None:
        handle = apply_activation_checkpointing(model, layers="Block")
        self.budgeted = BudgetedCheckpointing(model, handle, 22_000)
        self.plan = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self.plan is not None:
            yield
            return
        with self.budgeted.observing():
            yield
        self.plan = self.budgeted.plan()
        assert 0 < self.plan.recompute_share < 1
        self.budgeted.apply(self.plan.decisions)


class Together:
    """All techniques for activations at once."""

    def __init__(self, model: nn.Module) -> None:
        self.offloading = ActivationOffloading(model, min_offload_bytes=64)
        self.compression = CompressionStage(model, min_bytes=64)
        self.recomputation = Recomputation(model, min_bytes=64)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.offloading, self.compression, self.recomputation:
            yield


@pytest.mark.parametrize(("technique", "reshard"), [(Budget, True), (Together, True), (Together, False)])
def test_result_is_that_of_the_plain_model_with(mesh, technique, reshard):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    expected = train(copy.deepcopy(model))
    shard(model, mesh, reshard=reshard)
    actual = train(model, technique(model))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("reshard", [True, False])
def test_casts_are_not_made_again_of_weights_that_are_gone(mesh, reshard):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    recomputation = Recomputation(model, min_bytes=64)

    @contextmanager
    def around(stage: AbstractContextManager[object]) -> Iterator[None]:
        with torch.autocast("cpu", torch.bfloat16), stage:
            yield

    expected = train(copy.deepcopy(model), lambda: around(nullcontext()))
    shard(model, mesh, reshard=reshard)
    actual = train(model, lambda: around(recomputation))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert recomputation.report.num_dropped > 0
