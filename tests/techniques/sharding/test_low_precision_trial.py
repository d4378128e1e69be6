"""Weights come in 16 bit where nobody can tell: by what the code names, and by the calls of layers in a batch."""

from functools import partial

import pytest
import torch
from support.sharded_nets import Net, assert_same, batch, gradients, loss_of, make, on_ranks, sharded, weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.mixed_precision.weight_casts import find_autocast_weights
from lightning_vram.techniques.sharding import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import find_named_weights, plan_sharding_groups

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)


def narrow(net):
    found = find_autocast_weights(net) - find_named_weights(net)
    return {
        "low_precision_dtype": torch.bfloat16,
        "low_precision": {n for n, p in net.named_parameters() if p in found},
    }


def train(net, num_steps):
    results = []
    for seed in range(num_steps):
        net.zero_grad()
        with autocast():
            loss = loss_of(net, batch(seed))
        loss.backward()
        results.append(gradients(net))
    return results


def flat_shards_of(sharding):
    return [flat_shard for group in sharding.groups for flat_shard in group.flat_shards]


def narrow_names(sharding):
    """The weights that come in 16 bit, and are no longer on trial."""
    decided = [flat_shard for flat_shard in flat_shards_of(sharding) if not flat_shard.is_on_trial]
    narrow_ones = [flat_shard for flat_shard in decided if flat_shard.transfer_dtype is torch.bfloat16]
    return {parameter.name for flat_shard in narrow_ones for parameter in flat_shard.parameters}


def compare(kind, num_steps=3, tolerance=0.0):
    """Train beside a plain net, and return the names of weights that came in 16 bit at last."""
    net, plain = make(kind), make(kind)
    with sharded(net, **narrow(net)) as sharding:
        for ours, theirs in zip(train(net, num_steps), train(plain, num_steps), strict=True):
            assert_same(ours, theirs, tolerance)
        names = narrow_names(sharding)
    assert_same(weights(net), weights(plain))
    return names


def stock_weights(kind):
    return {name for name, _ in make(kind).named_parameters() if "norm" not in name}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class CastingAttention(Attention):
    def forward(self, x):
        return super().forward(x.to(self.inner.in_proj_weight.dtype))


@pytest.mark.parametrize("kind", [Attention, CastingAttention])
def test_attention_may_ask_for_dtypes_and_others_may_not(kind, mesh):
    net = nn.Sequential(kind(), kind())
    stock = {f"{number}.inner.{name}" for number in (0, 1) for name, _ in net[0].inner.named_parameters()}
    named = {f"{number}.inner.in_proj_weight" for number in (0, 1)} if kind is CastingAttention else set()
    assert narrow(net)["low_precision"] == stock - named
    x = torch.randn(2, 3, 16)
    sharding = FullSharding(net, mesh, plan_sharding_groups(net, min_params=100), ShardingOptions(**narrow(net)))
    for _ in range(2):
        with autocast():
            net(x).sum().backward()
    flat_shards = [flat_shard for flat_shard in flat_shards_of(sharding) if flat_shard.has_low_precision]
    assert flat_shards
    assert not any(flat_shard.is_on_trial or flat_shard.needs_fp32 for flat_shard in flat_shards)
    sharding.remove(make_whole=False)


class Siamese(Net):
    def forward(self, x):
        return super().forward(x) * super().forward(x + 1)


class CallsHeadTwice(Net):
    def forward(self, x):
        h = super().forward(x)
        return h + self.head(x)


class Penalized(nn.Module):
    """In one group with the root: its weights are there to be read."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        return self.down(self.up(x).relu()) + self.up.weight.norm()


class Clipped(Penalized):
    def forward(self, x):
        self.up.weight.data.clamp_(-0.1, 0.1)
        return self.down(self.up(x).relu())


class Adapter(nn.Module):
    """Asks for the dtype of a layer in a dictionary, as LoRA layers do."""

    def __init__(self):
        super().__init__()
        self.base, self.down = nn.Linear(6, 6), nn.ModuleDict({"default": nn.Linear(6, 6)})

    def forward(self, x):
        down = self.down["default"]
        return self.base(x) + down(x.to(down.weight.dtype) / 3)


class Adapted(Net):
    def __init__(self):
        super().__init__()
        self.blocks[1] = Adapter()


class Regularized(Penalized):
    """Goes over all weights of a part."""

    def forward(self, x):
        return self.down(self.up(x).relu()) + sum(p.square().mean() for p in self.down.parameters())


class PenalizedThroughAVariable(Penalized):
    def forward(self, x):
        up = self.up
        return self.down(up(x).relu()) + up.weight.norm()


class WrittenByAHook(Penalized):
    """Writes to a weight where no code of the model names it."""

    def __init__(self):
        super().__init__()
        self.up.register_forward_pre_hook(lambda up, args: up.weight.data.clamp_(-0.1, 0.1).sum and None)

    def forward(self, x):
        return self.down(self.up(x).relu())


class PartlyWide(Penalized):
    """Computes its second layer in float32, in one group with the first."""

    def forward(self, x):
        h = self.up(x).relu()
        with torch.autocast("cpu", enabled=False):
            return self.down(h.float())


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


class Compiled(Net):
    """Two blocks are compiled whole; in the second one every layer is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks[0].compile(backend="aot_eager", fullgraph=True)
        self.blocks[1] = torch.compile(self.blocks[1], backend="aot_eager", fullgraph=True)

    def forward(self, x):
        x = self.blocks[1](self.blocks[1](self.blocks[0](x)))
        return self.head(self.norm(self.blocks[2](x)))


def without(kind, *prefixes):
    return {name for name in stock_weights(kind) if not name.startswith(prefixes)}


@pytest.mark.quick_sample(11)  # not the last, which is compiled
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Net, stock_weights(Net)),
        (PartlyWide, set()),
        (Siamese, set()),
        (CallsHeadTwice, without(Net, "head")),
        (Penalized, without(Penalized, "up.weight")),
        (Clipped, set()),  # what is written in a step may be computed from the others
        (Adapted, without(Adapted, "blocks.1.down.default")),
        (Regularized, set()),
        (PenalizedThroughAVariable, set()),
        (WrittenByAHook, set()),
        (Checkpointed, stock_weights(Net)),  # it is no second use
        (Compiled, without(Compiled, "blocks.1.")),
    ],
)
def test_weights_that_need_32_bit_keep_them_and_no_others(mesh, kind, expected):
    torch._dynamo.reset()  # other tests have compiled the same code for layers of other kinds
    assert compare(kind, tolerance=1e-3 if kind is Compiled else 0.0) == expected


class Late(Net):
    """Calls all its layers twice from the third batch on."""

    num_batches = 0

    def forward(self, x):
        self.num_batches += 1
        return super().forward(x) + (super().forward(x + 1) if self.num_batches > 2 else 0)


def test_layers_that_are_called_more_often_later_are_told_of_and_widened(mesh):
    net, plain = make(Late), make(Late)
    with sharded(net, **narrow(net)):
        assert_same(*(train(one, 2)[1] for one in (net, plain)))
        with pytest.warns(UserWarning, match="was called more often before a backward than in earlier batches"):
            (ours,) = train(net, 1)
        assert_same(ours, train(plain, 1)[0], 0.02)
        assert_same(*(train(one, 1)[0] for one in (net, plain)))


class Branching(Net):
    """Its last block is used from the third batch on only."""

    num_batches = 0

    def forward(self, x):
        self.num_batches += 1
        for block in self.blocks[: 3 if self.num_batches > 2 else 2]:
            x = block(x)
        return self.head(self.norm(x))


def test_a_layer_that_was_not_used_yet_waits_for_its_turn(mesh):
    assert compare(Branching, num_steps=2) == without(Net, "blocks.2.")
    assert compare(Branching, num_steps=4) == stock_weights(Net)


class WrittenLate(Penalized):
    """Writes to a weight by a hook, from the third batch on."""

    num_batches = 0

    def __init__(self):
        super().__init__()
        self.up.register_forward_pre_hook(self.clip)

    def clip(self, up, args):
        if self.num_batches > 2:
            getattr(up, "weight").data.clamp_(-0.1, 0.1)  # noqa: B009 - as code that cannot be read

    def forward(self, x):
        self.num_batches += 1
        return self.down(self.up(x).relu())


def test_a_write_that_would_round_the_weight_is_an_error(mesh):
    net = make(WrittenLate)
    with sharded(net, **narrow(net)):
        train(net, 2)
        message = (
            r"^Parameter 'up\.weight' was written in a step, in which it has 16 bits: the write would round all of "
            r"it\. FSDPOffloadStrategy\(narrow_transfers=False\) gathers it in 32 bits\.$"
        )
        with pytest.raises(RuntimeError, match=message):
            train(net, 1)


class TwiceOnOne(Penalized):
    def forward(self, x):
        y = self.down(self.up(x).relu())
        return y + self.down(self.up(x)) if torch.distributed.get_rank() == 1 else y


def agree_on_width():
    for kind, expected in ((TwiceOnOne, set()), (Net, stock_weights(Net))):
        net = make(kind)
        with sharded(net, **narrow(net)) as sharding:
            train(net, 3)
            assert narrow_names(sharding) == expected


def test_ranks_agree(tmp_path):
    on_ranks(tmp_path, agree_on_width)
