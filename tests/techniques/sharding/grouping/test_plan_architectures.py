"""Fourteen architectures, grouped and really sharded: nothing about them changes but where their parameters lie."""

import pytest
import torch
from support.architectures import ARCHITECTURES, make_model
from torch import nn

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


def root_share(model: nn.Module, plan: ShardingPlan) -> float:
    parameters = dict(model.named_parameters())
    grouped = {p for group in plan.groups for name in group for p in model.get_submodule(name).parameters()}
    return sum(p.numel() for p in parameters.values() if p not in grouped) / sum(map(torch.numel, parameters.values()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_cut_into_its_blocks_and_large_parts(name):
    model = make_model(name)
    plan = plan_sharding_groups(model, min_params=MIN_PARAMS)
    others, num_blocks = EXPECTED[name]
    assert set(others) <= set(plan.groups)
    assert [len(group) for group in plan.groups if group not in others] == [1] * num_blocks
    assert root_share(model, plan) <= LARGE_ROOTS.get(name, 0.02)
    assert plan.replicated == ()
