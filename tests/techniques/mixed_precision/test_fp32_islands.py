"""Islands compute in float32 inside of autocast, as by hand, and are still islands in copies, pickles and graphs."""

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from lightning_vram.core.tensors.properties import iterate_leaves
from lightning_vram.techniques.mixed_precision.module_precision import Float32Islands, keep_norms_low

WIDTH = 8
Pair = namedtuple("Pair", "first second")


@dataclass
class Batch:
    """Checks what it is given, and computes a field."""

    data: Any
    note: Any = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        assert not hasattr(self, "size")
        self.size = 7


@dataclass(frozen=True, slots=True)
class Frozen:
    data: Any


class Net(nn.Module):
    """Linear, the island, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.island = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.island(self.before(x)))


class NetByHand(Net):
    """The same, written by somebody who knows."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        with torch.autocast("cpu", enabled=False):
            inside = self.island(hidden.float())
        return self.after(inside.to(hidden.dtype))


class Noted(nn.Module):
    """Notes what it gets, and returns what it is told."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got, self.is_autocast = (args, kwargs), torch.is_autocast_enabled("cpu")
        return self.output


def make_net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind()


def make_input() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True)


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def train(net: nn.Module, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    x = make_input()
    with autocast(dtype):
        output = net(x)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), [x, *net.parameters()])]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def is_island(net: Net) -> bool:
    """By what its first layer reads: the layer before it returns 16 bit."""
    dtypes: list[torch.dtype] = []
    with net.island[0].register_forward_hook(lambda _, args, output: dtypes.append(args[0].dtype)), autocast():
        net(make_input())
    (dtype,) = dtypes
    return dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_and_gradients_are_those_of_float32_by_hand(dtype):
    net = make_net()
    plain = train(net, dtype=dtype)
    Float32Islands([net.island], "cpu")
    got = train(net, dtype=dtype)
    assert_same(got, train(make_net(NetByHand), dtype=dtype))
    assert not torch.equal(got[0], plain[0])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: t,
        lambda t: (t, 1),
        lambda t: ["a", [t]],
        lambda t: {"a": {"b": t}, "c": None},
        lambda t: Pair(t, 2),
        lambda t: BaseModelOutput(last_hidden_state=t),
        lambda t: Batch(t, note="text"),
        lambda t: [Frozen({"a": Batch((1, t))}), Batch],
    ],
    ids=["tensor", "tuple", "list", "dict", "namedtuple", "ModelOutput", "dataclass", "frozen dataclass"],
)
@pytest.mark.parametrize("is_keyword", [False, True], ids=["positional", "keyword"])
def test_16_bit_tensors_in_any_structure_are_cast_in_and_out(wrap, is_keyword):
    def leaf(tree: Any) -> Tensor:
        return next(t for t in iterate_leaves(tree) if isinstance(t, Tensor))

    given = wrap(torch.ones(2, dtype=torch.float16))
    module = Noted(wrap(torch.full((2,), 3.0)))
    Float32Islands([module], "cpu")
    with autocast():
        output = module(x=given) if is_keyword else module(given)
    got = module.got[1]["x"] if is_keyword else module.got[0][0]
    assert type(got) is type(output) is type(given)
    assert leaf(got).dtype == torch.float32
    assert leaf(output).dtype == torch.float16  # that of the input, not that of autocast
    assert leaf(given).dtype == torch.float16
    assert not module.is_autocast


def test_other_dtypes_containers_without_16_bit_and_losses_are_handed_through_as_they_are():
    wide, number, loss = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.int32), torch.tensor(1e5)
    given = wide, number, {"wide": Batch(torch.ones(2))}  # which may be written into
    module = Noted((torch.ones(2), wide, number, loss, "text"))
    Float32Islands([module], "cpu")
    with autocast(torch.float16):
        low, *others = module(torch.ones(2).half(), *given)
        got = module.got[0]
        assert module(torch.ones(2)) is module.output  # float32 in, float32 out
    assert all(one is other for one, other in zip(got[1:], given, strict=True))
    assert all(one is other for one, other in zip(others, module.output[1:], strict=True))
    assert (got[0].dtype, low.dtype) == (torch.float32, torch.float16)


def test_losses_of_each_element_stay_float32():
    loss, low = nn.MSELoss(reduction="none"), torch.full((2, 3), 300.0).half()
    expected = loss(low.float(), torch.zeros(2, 3))
    Float32Islands([loss], "cpu")
    with autocast(torch.float16):
        got = loss(low, torch.zeros(2, 3).half())
    assert got.dtype == torch.float32  # 300 ** 2 is infinite in float16
    assert torch.equal(got, expected)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_without_autocast_for_the_device_the_module_runs_plainly(device_type):
    given, output = torch.ones(2).bfloat16(), torch.ones(2)
    module = Noted(output)
    Float32Islands([module], device_type)
    with torch.autocast("cpu", enabled=device_type == "cuda"):
        assert module(given) is output
        assert module.is_autocast == (device_type == "cuda")
    assert module.got[0][0] is given


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recomputation_in_backward_is_an_island_too(use_reentrant):
    net, calls = make_net(), []
    Float32Islands([net.island], "cpu")
    net.island[0].register_forward_hook(lambda _, args, output: calls.append((args[0].dtype, output.dtype)))
    expected = train(make_net(NetByHand))
    x = make_input()
    with autocast():
        output = checkpoint(net, x, use_reentrant=use_reentrant)
    output.float().square().sum().backward()  # outside of autocast
    assert calls == [(torch.float32, torch.float32)] * 2
    assert_same([output.detach(), x.grad, *(p.grad for p in net.parameters())], expected)


def pickled(net: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(net))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled])
def test_a_copy_stays_an_island_of_its_own_and_may_be_made_one_again(make_copy):
    net = make_net()
    handle = Float32Islands([net.island], "cpu")
    other = make_copy(net)
    handle.remove()
    assert not is_island(net)
    assert is_island(other)
    vars(vars(other.island)["_fp32_island"])["device_type"] = "cuda"  # as if it came from there
    again = Float32Islands([other.island], "cpu")  # it goes by the autocast that is meant now
    assert is_island(other)
    again.remove()
    assert is_island(other)


def compile_to_one_graph(net: Net) -> Net:
    torch._dynamo.reset()
    return torch.compile(net, fullgraph=True, backend="aot_eager")


def test_it_compiles_to_one_graph():
    net = make_net()
    compiled = compile_to_one_graph(net)
    before = train(compiled)
    handle = Float32Islands([net.island], "cpu")
    after = train(compiled)  # the graph without the island is not taken
    handle.remove()
    assert_same(train(compiled), before)
    assert_same(after, train(compile_to_one_graph(make_net(NetByHand))))
    assert not torch.equal(after[0], before[0])


class Compiled(nn.Module):
    """A residual block with an island and a low norm inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.island = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.island(self.inner(self.norm(x)))


def test_blocks_that_are_compiled_one_by_one_share_their_graphs():
    torch._dynamo.reset()
    counter = CompileCounter()
    net = nn.Sequential(*(Compiled() for _ in range(4)))
    for block in net:
        block.compile(backend=counter, fullgraph=True)
    for _ in range(2):  # a second fit takes those of the first
        handles = Float32Islands([block.island for block in net], "cpu"), keep_norms_low(net, "cpu")
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), autocast():
            net(make_input())
        for handle in handles:
            handle.remove()
    assert counter.frame_count <= 2


class WithHead(nn.Module):
    """Nobody calls the forward of its head, nor that of ``out_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.head[0](self.attention(x, x, x)[0]))


@pytest.fixture
def nothing_compiled(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr("lightning_vram.techniques.mixed_precision.module_precision._compiled", set())


@pytest.mark.parametrize(
    ("names", "idle", "is_compiled"),
    [
        (["attention.out_proj"], ["attention.out_proj"], False),
        (["attention", "attention.out_proj"], [], False),  # within an island that was called
        (["head", "head.0"], ["head"], False),
        (["head", "head.0"], ["head"], True),
        (["layers"], [], False),  # one of them was called
        (["layers", "layers.0"], ["layers.0"], False),
        (["layers", "layers.0"], [], True),  # compiled code tells classes alone
        (["", "head", "attention.out_proj"], [], False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("nothing_compiled")
def test_modules_that_nobody_calls_are_told(names, idle, is_compiled):
    net, x = WithHead(), make_input()
    handle = Float32Islands([net.get_submodule(name) for name in names], "cpu")
    assert [net.get_submodule(name) for name in names] == handle.idle
    with autocast():
        (torch.compile(net, backend="eager") if is_compiled else net)(x)
    assert handle.idle == [net.get_submodule(name) for name in idle]
    handle.remove()
    assert Float32Islands([net.attention.out_proj], "cpu").idle == [net.attention.out_proj]


def test_an_island_within_a_checkpoint_compiles_to_one_graph():
    torch._dynamo.reset()
    net = make_net()
    Float32Islands([net.island], "cpu")
    run = torch.compile(lambda x: checkpoint(net, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    with autocast():
        assert torch.equal(run(make_input()), net(make_input()))


def test_remove_leaves_nothing_and_may_be_called_again():
    net = make_net()
    before = [(type(part), dict(vars(part))) for part in net.modules()]
    handle = Float32Islands([net.island, net.before, net.island], "cpu")
    assert len(handle.modules) == 2
    handle.remove()
    handle.remove()
    assert [(type(part), dict(vars(part))) for part in net.modules()] == before


def test_an_island_inside_of_another_run_stays_one_until_that_ends():
    net = make_net()
    outer, inner = (Float32Islands([net.island], "cpu") for _ in range(2))
    inner.remove()
    assert is_island(net)
    outer.remove()
    assert type(net.island) is nn.Sequential


def test_the_members_of_a_list_of_modules_are_meant():
    net = make_net()
    net.blocks = nn.ModuleList([nn.ModuleDict({"a": net.island}), net.after])
    handle = Float32Islands([net.blocks], "cpu")
    assert len(handle.modules) == 2
    assert [name for name, part in net.named_modules() if "_fp32_island" in vars(part)] == ["island", "after"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # that they may still be met is the point
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.jit.script(nn.Linear(2, 2)), r"^module \w+ cannot be changed: it is scripted or traced\.$"),
        (
            lambda: nn.LazyLinear(2),
            r"^module LazyLinear cannot change its precision before it knows its sizes: run the model on one batch "
            r"first\.$",
        ),
    ],
    ids=["scripted", "without sizes"],
)
def test_a_module_that_cannot_be_changed_is_refused_and_nothing_is_changed(make, message):
    net = make_net()
    with pytest.raises(ValueError, match=message):
        Float32Islands([net.island, make(), net.after], "cpu")
    assert type(net.island) is nn.Sequential
