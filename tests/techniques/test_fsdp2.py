"""Checkpointed layers under FSDP2: sharded before or after, whole or in parts, kept unsharded or not."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_vram.techniques.checkpointing import apply_activation_checkpointing

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2))
        self.down = nn.Linear(64, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


@pytest.fixture(scope="module")
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def shard(model: nn.Sequential, mesh: DeviceMesh, *, reshard: bool, parts: bool) -> None:
    for block in model:
        inner = (block.up[0], block.down) if parts else ()
        for layer in (*inner, block):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def train(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    for _ in range(3):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict()
    return {name: getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)() for name, tensor in state.items()}


@pytest.mark.parametrize("parts", [False, True], ids=["whole layers", "parts of layers"])
@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_result_is_that_of_the_plain_model(mesh, is_first, reshard, parts):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    expected = train(copy.deepcopy(model))
    if is_first:
        handle = apply_activation_checkpointing(model, layers="Block")
    shard(model, mesh, reshard=reshard, parts=parts)
    if not is_first:
        handle = apply_activation_checkpointing(model, layers="Block")
    actual = train(model)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    handle.remove()
    train(model)
    apply_activation_checkpointing(model, layers="Block")
    train(model)
