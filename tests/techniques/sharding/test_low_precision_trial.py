"""Weights come in 16 bit where nobody can tell: by what the code names, and by the calls of layers in a batch."""

import gc
import weakref
from functools import partial

import pytest
import torch
from support.sharded_nets import Net, assert_same, batch, gradients, loss_of, make, on_ranks, sharded, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_vram.private_names.torch import SEE_INPUT, has_hooks
from lightning_vram.techniques.mixed_precision.weight_casts import find_autocast_weights
from lightning_vram.techniques.sharding import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.apply import LayerCalls
from lightning_vram.techniques.sharding.grouping import find_named_weights, plan_sharding_groups

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
autocast = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)


def narrow(net):
    found = find_autocast_weights(net) - find_named_weights(net)
    return {
        "low_precision_dtype": torch.bfloat16,
        "low_precision": {n for n, p in net.named_parameters() if p in found},
    }


def train(net, num_steps, loss_of=loss_of):
    results = []
    for seed in range(num_steps):
        net.zero_grad()
        with autocast():
            loss = loss_of(net, batch(seed))
        loss.backward()
        results.append(gradients(net))
    return results


def compare(kind, num_steps=3, tolerance=0.0, loss_of=loss_of):
    """Train beside a plain net, and return the dtype in which each weight came at last."""
    net, plain = make(kind), make(kind)
    with sharded(net, **narrow(net)) as sharding:
        for ours, theirs in zip(train(net, num_steps, loss_of), train(plain, num_steps, loss_of), strict=True):
            assert_same(ours, theirs, tolerance)
        flat_shards = [
            flat_shard for group in sharding.groups for flat_shard in group.flat_shards if not flat_shard.is_on_trial
        ]
        dtypes = {
            parameter.name: flat_shard.transfer_dtype
            for flat_shard in flat_shards
            for parameter in flat_shard.parameters
        }
    assert_same(weights(net), weights(plain))
    return dtypes


def narrow_names(dtypes):
    return {name for name, dtype in dtypes.items() if dtype is torch.bfloat16}


def stock_weights(kind):
    return {name for name, _ in make(kind).named_parameters() if "norm" not in name}


def test_stock_layers_are_narrow_from_the_second_batch(mesh):
    net = make()
    with sharded(net, **narrow(net)) as sharding:
        seen = []
        for group in sharding.groups:
            for flat_shard in group.flat_shards:
                if flat_shard.has_low_precision:
                    plain_fetch = flat_shard.fetch
                    flat_shard.fetch = lambda flat_shard=flat_shard, fetch=plain_fetch: (
                        seen.append(flat_shard.transfer_dtype) or fetch()
                    )
        train(net, 1)
        assert set(seen) == {torch.float32}
        seen.clear()
        train(net, 1)
        assert set(seen) == {torch.bfloat16}
    assert narrow_names(compare(Net)) == stock_weights(Net)


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
    flat_shards = [one for group in sharding.groups for one in group.flat_shards if one.has_low_precision]
    assert flat_shards
    assert not any(flat_shard.is_on_trial or flat_shard.needs_fp32 for flat_shard in flat_shards)
    sharding.remove(make_whole=False)


def test_gradients_that_are_kept_in_16_bit_do_not_keep_the_module(mesh):
    net = make()
    options = ShardingOptions(is_split=True, **narrow(net))
    sharding = FullSharding(net, mesh, plan_sharding_groups(net, min_params=100), options)
    for seed in range(2):
        net.zero_grad()
        with autocast():
            loss_of(net, batch(seed)).backward()
    assert any(
        parameter.low_precision_gradient is not None for group in sharding.groups for parameter in group.fsdp_params
    )
    sharding.remove(make_whole=False)
    module = weakref.ref(net)
    del net, sharding
    gc.collect()
    assert module() is None


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


class PartlyWide(nn.Module):
    """Computes its second layer in float32, in one group with the first."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x):
        h = self.up(x).relu()
        with torch.autocast("cpu", enabled=False):
            return self.down(h.float())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (PartlyWide, set()),
        (Siamese, set()),
        (CallsHeadTwice, stock_weights(Net) - {"head.weight", "head.bias"}),
        (Penalized, {"up.bias", "down.weight", "down.bias"}),
        (Clipped, set()),  # what is written in a step may be computed from the others
        (Adapted, stock_weights(Adapted) - {"blocks.1.down.default.weight", "blocks.1.down.default.bias"}),
        (Regularized, set()),
        (ReadThroughAVariable, {"up.weight", "up.bias", "down.weight", "down.bias"}),  # autocast casts it
        (PenalizedThroughAVariable, set()),
        (WrittenByAHook, set()),
    ],
)
def test_weights_that_need_32_bit_keep_them(mesh, kind, expected):
    assert narrow_names(compare(kind)) == expected


class Checkpointed(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def test_a_checkpoint_is_no_second_use(mesh):
    assert narrow_names(compare(Checkpointed)) == stock_weights(Net)


class Compiled(Net):
    """Two blocks are compiled whole; in the second one every layer is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks[0].compile(backend="aot_eager", fullgraph=True)
        self.blocks[1] = torch.compile(self.blocks[1], backend="aot_eager", fullgraph=True)

    def forward(self, x):
        x = self.blocks[1](self.blocks[1](self.blocks[0](x)))
        return self.head(self.norm(self.blocks[2](x)))


def test_compiled_layers_are_left_whole(mesh):
    torch._dynamo.reset()  # other tests have compiled the same code for layers of other kinds
    wide = {name for name in stock_weights(Compiled) if name.startswith("blocks.1.")}
    assert narrow_names(compare(Compiled, tolerance=1e-3)) == stock_weights(Compiled) - wide


class Late(Net):
    """Calls all its layers twice from the third batch on."""

    num_batches = 0

    def forward(self, x):
        self.num_batches += 1
        return super().forward(x) + (super().forward(x + 1) if self.num_batches > 2 else 0)


def test_layers_that_are_called_more_often_later_are_told_of_and_widened(mesh):
    net, plain = make(Late), make(Late)
    with sharded(net, **narrow(net)):
        for is_told, is_equal in [(False, True), (False, True), (True, False), (False, True)]:
            message = "was called more often before a backward than in earlier batches"
            if is_told:
                with pytest.warns(UserWarning, match=message):
                    (ours,) = train(net, 1)
            else:
                (ours,) = train(net, 1)
            (theirs,) = train(plain, 1)
            assert_same(ours, theirs, 0.0 if is_equal else 0.02)


class Branching(Net):
    """Its last block is used from the third batch on only."""

    num_batches = 0

    def forward(self, x):
        self.num_batches += 1
        for block in self.blocks[: 3 if self.num_batches > 2 else 2]:
            x = block(x)
        return self.head(self.norm(x))


def test_a_layer_that_was_not_used_yet_waits_for_its_turn(mesh):
    unused = {f"blocks.2.{name}" for name, _ in make().blocks[2].named_parameters()}
    assert narrow_names(compare(Branching, num_steps=2)) == stock_weights(Net) - unused
    assert narrow_names(compare(Branching, num_steps=4)) == stock_weights(Net)


class Rarely(Penalized):
    """Calls its first layer in the third batch only, and then twice."""

    num_batches = 0

    def forward(self, x):
        self.num_batches += 1
        h = self.up(x) + self.up(x + 1) if self.num_batches == 3 else F.pad(x, (0, 3))
        return self.down(h)


def test_a_layer_that_was_not_used_yet_is_counted_on(mesh):
    net, plain = make(Rarely), make(Rarely)
    with sharded(net, **narrow(net)):
        train(net, 2), train(plain, 2)
        with pytest.warns(UserWarning, match="was called more often before a backward than in earlier batches"):
            train(net, 1)
        train(plain, 1)
        assert_same(*(train(each, 1)[0] for each in (net, plain)))


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
    net = make(TwiceOnOne)
    with sharded(net, **narrow(net)) as sharding:
        train(net, 3)
        (flat_shard,) = (flat_shard for group in sharding.groups for flat_shard in group.flat_shards)
        assert flat_shard.transfer_dtype is torch.float32


def agree_on_narrowness():
    net = make()
    with sharded(net, **narrow(net)) as sharding:
        train(net, 3)
        flat_shards = [
            flat_shard for group in sharding.groups for flat_shard in group.flat_shards if flat_shard.has_low_precision
        ]
        assert flat_shards
        assert {flat_shard.transfer_dtype for flat_shard in flat_shards} == {torch.bfloat16}


def test_ranks_agree(tmp_path):
    on_ranks(tmp_path, agree_on_width, agree_on_narrowness)


def test_hooks_that_count_calls_do_not_keep_a_layer_from_being_tiled():
    layer = nn.Linear(6, 9)
    LayerCalls(layer, torch.device("cpu"))
    assert not has_hooks(layer, SEE_INPUT)
    layer.register_forward_pre_hook(lambda *_: None)
    assert has_hooks(layer, SEE_INPUT)
