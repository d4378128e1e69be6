"""Sharding plans: what is gathered together, by itself or by the user's word."""

import pytest
import torch
from support.architectures import ARCHITECTURES, make_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations

from lightning_vram.techniques.sharding.grouping import ShardingPlan, plan_sharding_groups


class Block(nn.Module):
    """72 parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width, bias=False), nn.Linear(width, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(self.norm(hidden)))


class Net(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden


def blocks(num_blocks: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(Block(width) for _ in range(num_blocks))


def groups_of(model: nn.Module, wrap="auto", min_params: int = 72) -> tuple[tuple[str, ...], ...]:
    return plan_sharding_groups(model, wrap, min_params=min_params).groups


def test_the_children_of_a_list_and_large_parts_beside_it_are_groups():
    model = Net(embedding=nn.Linear(4, 18, bias=False), layers=blocks(2), norm=nn.LayerNorm(4))
    assert groups_of(model) == (("embedding",), ("layers.0",), ("layers.1",))


def test_small_blocks_in_a_row_are_put_together_but_not_those_of_a_dictionary():
    names = [f"layers.{number}" for number in range(24)]
    groups = groups_of(Net(layers=blocks(24)), min_params=72 * 5)
    assert [len(group) for group in groups] == [5, 5, 5, 9]  # the last four are too few
    assert [name for group in groups for name in group] == names
    heads = Net(heads=nn.ModuleDict({name: Block() for name in "abcd"}))  # which of them run, and when, is not known
    assert groups_of(heads, min_params=100) == ()
    assert groups_of(heads) == tuple((f"heads.{name}",) for name in "abcd")


class Reversed(nn.Sequential):
    """Need not run all of its layers."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


@pytest.mark.parametrize(("kind", "groups"), [(nn.Sequential, (("0", "1", "3"), ("4",))), (Reversed, (("3",), ("4",)))])
def test_layers_of_a_sequential_are_put_together_unless_it_has_a_forward_of_its_own(kind, groups):
    model = kind(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 40), nn.Linear(40, 4), nn.ReLU())
    assert groups_of(model, min_params=100) == groups


def test_stages_of_a_sequential_are_looked_into():
    stages = [nn.Sequential(*(Block() for _ in range(6))) for _ in range(3)]
    groups = groups_of(Net(stem=nn.Linear(4, 4), stages=nn.Sequential(*stages)), min_params=100)
    assert groups[0] == ("stages.0.0", "stages.0.1")
    assert len(groups) == 9


def test_experts_of_a_block_are_not_groups():
    """Which experts run differs between ranks."""

    class Mixture(Block):
        def __init__(self) -> None:
            super().__init__()
            self.experts = blocks(4)

    assert groups_of(Net(layers=nn.ModuleList([Mixture(), Mixture()]))) == (("layers.0",), ("layers.1",))


def test_what_a_model_declares_comes_first():
    """As transformers' models do."""

    class Declaring(Net):
        _no_split_modules = ("Block",)

    stages = nn.ModuleList([Net(one=Block(), two=Block()), Net(one=Block(), two=Block())])
    names = ("encoder.stages.0.one", "encoder.stages.0.two", "encoder.stages.1.one", "encoder.stages.1.two")
    assert groups_of(Net(encoder=Declaring(stages=stages))) == tuple((name,) for name in names)
    assert groups_of(Net(encoder=Net(stages=stages))) == (("encoder.stages.0",), ("encoder.stages.1",))


def test_a_model_without_containers_is_cut_at_its_large_parts():
    body = Net(down=Block(20), up=Block(20), norm=nn.LayerNorm(4))
    assert groups_of(Net(model=body)) == (("model.down",), ("model.up",))


def test_tied_parts_are_one_group():
    model = Net(embedding=nn.Linear(4, 4), layers=blocks(2, width=20), head=nn.Linear(4, 4))
    model.head.weight = model.embedding.weight
    groups = groups_of(model, min_params=16)
    assert groups == (("embedding", "head"), ("layers.0",), ("layers.1",))


def test_a_part_that_shares_with_one_outside_of_all_groups_takes_it_along():
    model = Net(norm=nn.LayerNorm(4), layers=blocks(2))
    model.layers[1].norm.weight = model.norm.weight
    assert groups_of(model) == (("norm", "layers.1.norm"), ("layers.0",), ("layers.1",))


def test_a_layer_that_all_blocks_have_is_a_group_inside_of_them():
    model = Net(layers=blocks(3))
    shared = model.layers[0].norm
    for block in model.layers:
        block.norm = shared
    assert groups_of(model) == (("layers.0.norm",), ("layers.0",), ("layers.1",), ("layers.2",))


class Reading(Net):
    """Uses the weight of its embedding for the output."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.weight


def test_a_module_whose_weight_an_outer_forward_reads_stays_with_the_outer_one():
    parts = {"embedding": nn.Linear(4, 4), "layers": blocks(2), "last": nn.Linear(4, 4)}
    groups = groups_of(Reading(**parts), min_params=16)
    assert groups == (("layers.0",), ("layers.1",), ("last",))
    assert groups_of(Net(**parts), min_params=16) == (("embedding",), *groups)


def test_blocks_that_share_with_a_module_that_is_read_are_given_up():
    model = Reading(embedding=nn.Linear(4, 8, bias=False), layers=blocks(3))
    model.layers[1].up.weight = model.embedding.weight
    assert groups_of(model) == (("layers.0",), ("layers.2",))


@pytest.mark.parametrize(
    "make", [lambda: nn.MultiheadAttention(8, 2), lambda: parametrizations.weight_norm(nn.Linear(8, 8))]
)
def test_parts_of_attention_and_of_a_parametrization_are_not_groups(make):
    assert groups_of(Net(first=make(), last=make(), norm=nn.LayerNorm(8)), min_params=64) == (("first",), ("last",))


def test_parameters_without_a_dimension_are_named_with_all_their_names():
    model = Net(layers=blocks(2))
    scale = nn.Parameter(torch.ones(()))
    model.layers[0].scale = model.scale = scale
    assert plan_sharding_groups(model, min_params=72).replicated == ("scale", "layers.0.scale")


def test_what_is_sharded_already_is_left_alone(mesh):
    model = Net(own=Net(inner=Block(), layers=blocks(2)), layers=blocks(2))
    model.own.inner.scale = nn.Parameter(torch.ones(1))
    fully_shard(model.own, mesh=mesh)
    assert plan_sharding_groups(model, min_params=72) == ShardingPlan((("layers.0",), ("layers.1",)), ())
    assert groups_of(model, ["Block"]) == (("layers.0",), ("layers.1",))
    assert groups_of(fully_shard(Net(layers=blocks(2)), mesh=mesh)) == ()


@pytest.mark.parametrize("wrap", [["Block"], (Block,), lambda name, part: type(part) is Block])
def test_a_choice_is_taken_whatever_the_sizes(wrap):
    model = Net(embedding=nn.Linear(400, 4), layers=blocks(2))
    assert groups_of(model, wrap, min_params=1_000_000) == (("layers.0",), ("layers.1",))


def test_nested_choices_come_inner_first():
    groups = [name for (name,) in groups_of(Net(wide=Net(block=Block())), ["Linear", "Block", "Net"])]
    assert set(groups[:2]) == {"wide.block.up", "wide.block.down"}
    assert groups[2:] == ["wide.block", "wide"]


@pytest.mark.parametrize(
    ("wrap", "kind", "message"),
    [
        (
            ["Blok"],
            ValueError,
            r"^wrap='Blok' matches no module\. The model has the classes Block, LayerNorm, Linear, ",
        ),
        ([nn.Conv2d], ValueError, r"^wrap=<class '.*Conv2d'> matches no module\. The model has the classes Block, "),
        (lambda *_: False, ValueError, r"^wrap=<function .*> matches no module\. The model has the classes Block, "),
        (
            ["ModuleList"],
            ValueError,
            r"^wrap='ModuleList' matches 'layers', whose parameters are used without calling ",
        ),
        ("Block", TypeError, r"^wrap must be 'auto', a list of classes or their names, or a function, got 'Block'\.$"),
        ([3], TypeError, r"^wrap must be 'auto', a list of classes or their names, or a function, got \[3\]\.$"),
        ([], TypeError, r"^wrap must be 'auto', .*, got \[\]\.$"),
    ],
)
def test_a_wrong_choice_is_told(wrap, kind, message):
    with pytest.raises(kind, match=message):
        plan_sharding_groups(Net(layers=blocks(2)), wrap)


# --- architectures ---

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


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # torch and transformers
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_cut_into_its_blocks_and_large_parts(name):
    model = make_model(name)
    plan = plan_sharding_groups(model, min_params=MIN_PARAMS)
    others, num_blocks = EXPECTED[name]
    assert set(others) <= set(plan.groups)
    assert [len(group) for group in plan.groups if group not in others] == [1] * num_blocks
    assert root_share(model, plan) <= LARGE_ROOTS.get(name, 0.02)
    assert plan.replicated == ()
