"""Techniques for activations under FSDP2: sharded before or after, whole or in parts, kept unsharded or not."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.budget import BudgetedCheckpointing
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


def shard(model: nn.Sequential, mesh: DeviceMesh, *, reshard: bool, parts: bool) -> None:
    for block in model:
        inner = (block.up[0], block.down) if parts else ()
        for layer in (*inner, block):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


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


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("parts", [False, True], ids=["whole layers", "parts of layers"])
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("save", [None, SavePolicy("matmuls")], ids=["inputs", "matmuls"])
def test_result_is_that_of_the_plain_model(mesh, save, is_first, reshard, parts):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    expected = train(copy.deepcopy(model))
    if is_first:
        handle = apply_activation_checkpointing(model, layers="Block", save=save)
    shard(model, mesh, reshard=reshard, parts=parts)
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


@contextmanager
def _together(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _all(model: nn.Module) -> Callable[[], AbstractContextManager[object]]:
    offloading, compression = ActivationOffloading(model, min_offload_bytes=64), CompressionStage(model, min_bytes=64)
    recomputation = Recomputation(model, min_bytes=64)
    return lambda: _together(offloading, compression, recomputation)


def _entered(context: AbstractContextManager[object]) -> Callable[[], AbstractContextManager[object]]:
    return lambda: context


TECHNIQUES = {
    "a budget": Budget,
    "offload": lambda model: _entered(ActivationOffloading(model, min_offload_bytes=64)),
    "compression": lambda model: _entered(CompressionStage(model, min_bytes=64)),
    "all": _all,
}


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_result_is_that_of_the_plain_model_with(mesh, technique, reshard):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    expected = train(copy.deepcopy(model))
    shard(model, mesh, reshard=reshard, parts=False)
    actual = train(model, TECHNIQUES[technique](model))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_parameters_do_not_travel(mesh):
    """Of a layer without activations of its own but its input, the input is all that travels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    offloading = ActivationOffloading(model, min_offload_bytes=64, window_bytes=0)
    hidden = torch.randn(8, 256)
    with offloading:
        loss = model(hidden).sum()
    assert offloading.report.offloaded_bytes == 2 * hidden.nbytes
    loss.backward()
