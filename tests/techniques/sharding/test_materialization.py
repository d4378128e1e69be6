"""Models built on the meta device get memory and values, block by block."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.architectures import ARCHITECTURES, TinyLM, compute_loss, make_inputs, make_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_vram.techniques.sharding.grouping import plan_sharding_groups
from lightning_vram.techniques.sharding.materialization import has_meta, materialize

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch and transformers


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build().train()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def materialize_by_group(model: nn.Module, seed: int = 0) -> None:
    for group in plan_sharding_groups(model, min_params=1000).groups:
        for name in group:
            materialize(model.get_submodule(name), seed=seed, model=model)
    materialize(model, seed=seed)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_values_are_distributed_as_those_of_a_model_that_is_built_with_memory(name):
    plain, model = make_model(name), on_meta(ARCHITECTURES[name])
    tensors = [*model.parameters(), *model.buffers()]
    assert has_meta(model)
    materialize_by_group(model)
    assert not has_meta(model)
    assert all(one is other for one, other in zip(tensors, [*model.parameters(), *model.buffers()], strict=True))
    for (key, actual), expected in zip(values_of(model).items(), values_of(plain).values(), strict=True):
        spread = expected.double().std() if expected.numel() > 1 else 0
        if expected.numel() > 100 and expected.is_floating_point() and spread > 0:
            assert 0.7 < actual.std() / spread < 1.4, key
        elif spread == 0 or not expected.is_floating_point():
            assert torch.equal(actual, expected), key
    for key, parameter in plain.named_parameters():
        assert model.get_parameter(key).requires_grad == parameter.requires_grad
    assert compute_loss(name, model, make_inputs(name)).isfinite()


def test_values_depend_on_the_seed_and_the_names_only():
    whole, parts, other = (on_meta(TinyLM) for _ in range(3))
    materialize(whole, seed=3)
    torch.manual_seed(1)
    for name in ("blocks.2", "head", "blocks.0"):
        materialize(parts.get_submodule(name), seed=3, model=parts)
    materialize(parts, seed=3)
    materialize(other, seed=4)
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), parts.parameters(), strict=True))
    assert not torch.equal(whole.head.weight, other.head.weight)
    assert not torch.equal(whole.blocks[0].up.weight, whole.blocks[1].up.weight)


def test_what_has_values_keeps_them():
    model = on_meta(TinyLM)
    model.blocks[0] = TinyLM().blocks[0]
    weight = model.norm.weight = nn.Parameter(torch.full((16,), 3.0))  # beside a bias without memory
    before = values_of(model.blocks[0])
    materialize(model, seed=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in values_of(model.blocks[0]).items())
    assert model.norm.weight is weight
    assert torch.equal(weight, torch.full((16,), 3.0))
    assert torch.equal(model.norm.bias, torch.zeros(16))
    before = values_of(model)
    materialize(model, seed=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in values_of(model).items())


@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_parameters_stay_tied_and_untied_ones_untied(is_tied):
    """``init_weights`` of transformers would tie them again."""
    model = on_meta(ARCHITECTURES["tied_llama"])
    embedding = model.model.embed_tokens
    if not is_tied:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    materialize(embedding, seed=0, model=model)
    before = embedding.weight.clone()
    materialize(model, seed=0)
    assert (model.lm_head.weight is embedding.weight) == is_tied
    assert torch.equal(embedding.weight, before)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor, self.count = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))


class HalfReset(Scale):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.count)


@pytest.mark.parametrize(("kind", "num_missed"), [(Scale, 2), (HalfReset, 1)])
def test_what_nobody_initializes_is_told(kind, num_missed):
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), kind(), kind()))
    other = copy.deepcopy(model)
    message = (
        rf"^Parameters .* have no initial values: {kind.__name__} \(factor\)\. Define reset_parameters\(\) in these "
    )
    with pytest.raises(TypeError, match=message):
        materialize(model, seed=0)
    materialize(other, seed=0, uninitialized_ok=True)
    assert torch.equal(other[1].factor, torch.zeros(3))
    assert torch.equal(other[1].count, torch.zeros(3) if num_missed == 2 else torch.ones(3))


class ResetsAll(nn.Module):
    """Initializes all of its parts, as ``nn.Transformer``, and its own scale without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.scale = nn.Parameter(torch.empty(2, 3))

    def init_weights(self, gain: float = 2.0) -> None:
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.orthogonal_(parameter, gain)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers[0](hidden)


def test_an_outer_initializer_reaches_parts_that_are_sharded_first_and_each_once(mesh):
    model = on_meta(ResetsAll)
    for number in (0, 1):
        materialize(model.layers[number], seed=0, model=model)
        fully_shard(model.layers[number], mesh=mesh)
    model.layers[2] = nn.Linear(3, 3)
    before = [layer.weight.detach().clone() for layer in model.layers]
    materialize(model, seed=0)
    first, second = (layer.weight.full_tensor() for layer in model.layers[:2])
    for weight in (first, second):
        torch.testing.assert_close(weight @ weight.T, 4 * torch.eye(3))
    assert not torch.equal(first, second)
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(model.layers, before, strict=True))
    torch.testing.assert_close(model.scale @ model.scale.T, 4 * torch.eye(2))
