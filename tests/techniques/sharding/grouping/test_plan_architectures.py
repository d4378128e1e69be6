"""Fourteen architectures, grouped and really sharded: nothing about them changes but where their parameters lie."""

import math

import pytest
import torch
from support.architectures import ARCHITECTURES, compute_loss, make_inputs, make_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from lightning_vram.techniques.sharding.grouping import ShardingPlan, plan_sharding_groups

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch and transformers
MIN_PARAMS = 1000

EXPECTED = {  # groups that are not one block each, and how many are
    "tiny_lm": ([("embedding",), ("head",)], 3),
    "tied_lm": ([("embedding", "head")], 3),
    "nn_transformer": ([("source",), ("target",), ("head",)], 4),
    "mlp": ([("6", "8")], 3),
    "conv_bn": ([("features.0", "features.1", "features.3"), ("features.4", "features.6", "features.7")], 0),
    "llama": ([("model.embed_tokens",), ("lm_head",)], 3),
    "tied_llama": ([("model.embed_tokens", "lm_head")], 3),
    "mixtral": ([("model.embed_tokens",), ("lm_head",)], 3),
    "gpt2": ([("transformer.wte", "lm_head")], 3),
    "t5": ([("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")], 4),
    "bert": ([("bert.embeddings.word_embeddings", "cls.predictions")], 3),
    "vit": ([("vit.embeddings",)], 3),
    "resnet": ([("resnet.embedder",)], 2),
    "whisper": ([("model.decoder.embed_tokens", "proj_out")], 4),
}
LARGE_ROOTS = {"resnet": 0.2, "whisper": 0.1}  # a stage, convolutions of the input: below MIN_PARAMS
ENCODER_DECODERS = ("t5", "whisper")  # hooks change the order in which the decoder layers' gradients are added


def root_share(model: nn.Module, plan: ShardingPlan) -> float:
    parameters = dict(model.named_parameters())
    grouped = {p for group in plan.groups for name in group for p in model.get_submodule(name).parameters()}
    return sum(p.numel() for p in parameters.values() if p not in grouped) / sum(map(torch.numel, parameters.values()))


def shard(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    replicated = {parameters[name] for name in plan.replicated}
    for group in plan.groups:
        fully_shard([model.get_submodule(name) for name in group], mesh=mesh, ignored_params=replicated)
    fully_shard(model, mesh=mesh, ignored_params=replicated)


def test_all_architectures_are_expected_here():
    assert EXPECTED.keys() == ARCHITECTURES.keys()
    assert len(ARCHITECTURES) == 14


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_cut_into_its_blocks_and_large_parts(name):
    model = make_model(name)
    plan = plan_sharding_groups(model, min_params=MIN_PARAMS)
    others, num_blocks = EXPECTED[name]
    assert set(others) <= set(plan.groups)
    assert [len(group) for group in plan.groups if group not in others] == [1] * num_blocks
    assert root_share(model, plan) <= LARGE_ROOTS.get(name, 0.02)
    assert plan.replicated == ()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_plan_does_not_need_values(name):
    with torch.device("meta"):
        model = ARCHITECTURES[name]()
    assert plan_sharding_groups(model, min_params=MIN_PARAMS) == plan_sharding_groups(
        make_model(name), min_params=MIN_PARAMS
    )


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("min_params", [100, MIN_PARAMS, 5000])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_the_plain_model(name, min_params, mesh):
    plain, model = make_model(name), make_model(name)
    plan = plan_sharding_groups(model, min_params=min_params)
    shard(model, plan, mesh)
    for seed in (0, 1):
        inputs = make_inputs(name, seed=seed)
        losses = [compute_loss(name, one, inputs) for one in (plain, model)]
        assert torch.equal(*losses)
        assert math.isfinite(losses[0])
        for loss in losses:
            loss.backward()
    parameters = dict(model.named_parameters())
    tolerance = 1e-6 if name in ENCODER_DECODERS else 0
    for key, parameter in plain.named_parameters():
        if not parameter.requires_grad:
            assert parameters[key].grad is None
            continue
        gradient = parameters[key].grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, rtol=tolerance, atol=tolerance, msg=key)
