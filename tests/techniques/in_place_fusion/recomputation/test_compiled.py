"""Norms and activations in compiled code are recomputed: fewer maps kept, one graph, the same bits."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_vram.techniques.in_place_fusion.recomputation import apply_compiled_recomputation

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BATCH, WIDTH = 4, 32
MAP = BATCH * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def step(model: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.numel() >= BATCH * WIDTH:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).square().mean()
    loss.backward()
    return sum(storages.values()) // MAP, loss


@pytest.mark.slow
def test_a_compiled_block_keeps_its_input_and_what_the_first_product_made() -> None:
    """Per block: plain keeps x, norm, up and act, 1 + 1 + 4 + 4 maps; ours x and up, 1 + 4; the loss keeps one more."""
    x, kept = torch.randn(BATCH, WIDTH), []
    models = [make(), make()]
    handle = apply_compiled_recomputation(models[1])
    assert len(handle.modules) == 4
    for model in models:
        torch._dynamo.reset()
        num_maps, _ = step(torch.compile(model, backend="aot_eager", fullgraph=True), x)
        kept.append(num_maps)
    assert kept == [21, 11]
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_eager_code_and_what_was_removed_runs_as_it_did() -> None:
    model, plain = make(), make()
    classes = [type(module) for module in model.modules()]
    handle = apply_compiled_recomputation(model)
    assert step(model, torch.ones(BATCH, WIDTH)) == step(plain, torch.ones(BATCH, WIDTH))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in twin.modules()] == classes
        assert twin.state_dict().keys() == plain.state_dict().keys()
    handle.remove()
    handle.remove()
    assert [type(module) for module in model.modules()] == classes
    assert "_compiled_recomputation" not in vars(model[0].norm)
