"""Norms return 16 bit under autocast, sum in float32, and a block saves half of what their inputs took."""

import copy
import pickle

import pytest
import torch
from support.helpers import saved_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import grad, vmap
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from lightning_vram.demos import Block
from lightning_vram.techniques.mixed_precision.module_precision import Float32Islands, keep_norms_low

BATCH, LENGTH, WIDTH = 2, 8, 16
ELEMENTS = BATCH * LENGTH * WIDTH
MAKERS = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "LayerNorm without gains": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "LayerNorm over two dimensions": lambda: nn.LayerNorm((LENGTH, WIDTH)),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "RMSNorm without gains": lambda: nn.RMSNorm(WIDTH, eps=1e-5, elementwise_affine=False),
    "LlamaRMSNorm": lambda: LlamaRMSNorm(WIDTH),
    "T5LayerNorm": lambda: T5LayerNorm(WIDTH),
}


class Stock(nn.LayerNorm):
    """A subclass that adds nothing to forward."""


class WideLayerNorm(nn.LayerNorm):
    """A subclass with a forward of its own, and a result of its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.got = x.dtype
        return super().forward(x), x.double()


class ThreeReaders(nn.Module):
    """A norm of a float32 residual stream, read by three linear layers as attention does."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.norm = norm
        self.readers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x + self.scale)
        return sum(reader(hidden) for reader in self.readers)


def make_norm(name: str) -> nn.Module:
    torch.manual_seed(0)
    norm = MAKERS[name]()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def make_input(offset: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(BATCH, LENGTH, WIDTH, generator=generator) + offset).requires_grad_()


def autocast(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def is_changed(module: nn.Module) -> bool:
    return not {"_low_norm", "_fp32_island"}.isdisjoint(vars(module))


def count_saved_bytes(module: nn.Module) -> int:
    x = make_input()

    def compute_loss() -> Tensor:
        with autocast():
            return module(x).float().sum()

    return saved_bytes(module, compute_loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_the_output_is_the_float32_one_of_the_rounded_input_rounded_once(name, dtype):
    norm, x = make_norm(name), make_input()
    norm.requires_grad_(False)
    plain = norm(x)
    handle = keep_norms_low(norm, "cpu")
    assert len(handle.modules) == 1
    with autocast(dtype):
        got = norm(x)
    assert got.dtype == dtype
    assert relative_error(got, plain) < {torch.bfloat16: 1e-2, torch.float16: 1.25e-3}[dtype]
    handle.remove()
    if "T5" not in name:  # which reads float32
        x = x.to(dtype).float()
    if isinstance(norm, nn.RMSNorm):  # its gains are rounded; on a CPU those of a LayerNorm are not
        norm.to(dtype).float()
    ulp = torch.finfo(dtype).eps * norm(x).abs()
    num_roundings = 2 if name == "LlamaRMSNorm" else 1  # it rounds before its gains as well
    assert ((got.float() - norm(x)).abs() <= num_roundings * 0.501 * ulp).all()


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "LlamaRMSNorm", "T5LayerNorm"])
def test_statistics_are_taken_in_float32(name):
    """Of a large mean, 16 bit would keep nothing that is left after it is subtracted."""
    norm = make_norm(name)
    x = make_input(offset=100.0).detach().bfloat16().float().requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).bfloat16().float()
    expected = torch.autograd.grad(norm(x), [x, *norm.parameters()], direction)
    keep_norms_low(norm, "cpu")
    with autocast():
        output = norm(x)
    got = torch.autograd.grad(output, [x, *norm.parameters()], direction.to(output.dtype))
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, other) < 2e-2


def test_a_pre_norm_block_saves_4_bytes_less_per_element():
    """Each of two norms saves its input in 2 bytes rather than 4; their outputs were saved in 16 bit before."""
    block = Block(WIDTH, num_heads=2, dropout=0.0)
    plain = count_saved_bytes(block)
    keep_norms_low(block, "cpu")
    assert plain - count_saved_bytes(block) == 4 * ELEMENTS


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 4 for the casts of the output that two of three readers had of their own, and
        ("LayerNorm", 6 * ELEMENTS),  # 2 for the input
        # a CPU's saves the input in float32, copied from 16 bit, but what it multiplies with its gains, and these
        ("RMSNorm", 4 * ELEMENTS - 2 * WIDTH),
        ("LlamaRMSNorm", 6 * ELEMENTS),  # 2 for what it multiplies with its gains
        ("T5LayerNorm", 4 * ELEMENTS),
    ],
)
def test_what_is_saved_with_three_readers(name, expected):
    net = ThreeReaders(make_norm(name))
    plain = count_saved_bytes(net)
    keep_norms_low(net, "cpu")
    assert plain - count_saved_bytes(net) == expected


def test_the_default_eps_of_rms_norm_is_that_of_float32():
    norm, x = nn.RMSNorm(WIDTH), torch.full((1, WIDTH), 2.0**-10)  # its square is far below bfloat16's eps
    with autocast():
        plain = norm(x)
        keep_norms_low(norm, "cpu")
        assert relative_error(norm(x), plain) < 4e-3


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "LlamaRMSNorm", "T5LayerNorm"])
def test_without_autocast_for_the_device_and_in_float64_norms_run_plainly(name):
    norm = make_norm(name)
    other, wide = copy.deepcopy(norm), copy.deepcopy(norm).double()
    expected, expected_wide = norm(make_input()), wide(make_input().double())
    keep_norms_low(norm, "cuda")
    keep_norms_low(other, "cpu")
    keep_norms_low(wide, "cpu")
    assert torch.equal(other(make_input()), expected)
    with autocast():
        assert torch.equal(norm(make_input()), expected)
        assert torch.equal(wide(make_input().double()), expected_wide)


def test_subclasses_names_and_what_is_skipped():
    net = nn.ModuleDict(
        {
            "stock": Stock(WIDTH),
            "own": WideLayerNorm(WIDTH),
            "other": nn.BatchNorm1d(WIDTH),
            "group": nn.GroupNorm(2, WIDTH),
            "island": nn.Sequential(nn.LayerNorm(WIDTH), nn.Sequential(nn.RMSNorm(WIDTH))),
            "skipped": nn.LayerNorm(WIDTH),
        }
    )
    handle = keep_norms_low(net, "cpu", skip=[net["island"], net["skipped"]])
    assert [name for name, part in net.named_modules() if is_changed(part)] == ["stock", "own"]
    assert len(handle.modules) == 2
    with autocast():
        assert net["stock"](input=make_input()).dtype == torch.bfloat16
        low, wide = net["own"](make_input())
    assert (low.dtype, wide.dtype, net["own"].got) == (torch.bfloat16, torch.float64, torch.float32)
    handle.remove()
    handle.remove()
    assert not any(is_changed(part) for part in net.modules())


def test_a_model_without_norms_is_refused():
    message = r"^low_precision_norms=True finds no LayerNorm or RMSNorm in Sequential: leave it out\.$"
    with pytest.raises(ValueError, match=message):
        keep_norms_low(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "cpu")
    net = nn.Sequential(nn.LayerNorm(2))
    with pytest.raises(ValueError, match=r"^low_precision_norms=True .* in Sequential outside of fp32_modules: leave"):
        keep_norms_low(net, "cpu", skip=[net[0]])


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_stay_low_and_have_the_same_keys(make_copy):
    net = ThreeReaders(make_norm("LayerNorm"))
    keys = list(net.state_dict())
    handle = keep_norms_low(net, "cpu")
    assert list(net.state_dict()) == keys
    other = make_copy(net)
    handle.remove()
    with torch.no_grad():
        for parameter in other.norm.parameters():
            parameter.zero_()
    with autocast():
        assert other.norm(make_input()).dtype == torch.bfloat16
        assert not other.norm(make_input()).any()
        assert net.norm(make_input()).dtype == torch.float32


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "LlamaRMSNorm"])
def test_it_compiles_to_one_graph(name):
    torch._dynamo.reset()
    net, x = ThreeReaders(make_norm(name)), make_input()
    keep_norms_low(net, "cpu")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with autocast():
        got, expected = compiled(x), net(x)
    assert torch.equal(got, expected)
    got.float().sum().backward()
    assert net.norm.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_torch_func_transforms_of_each_row_give_the_gradients_of_autograd(name):
    norm, x = make_norm(name), make_input()

    def compute_loss(row: Tensor) -> Tensor:
        with autocast():
            return norm(row).float().square().sum()

    keep_norms_low(norm, "cpu")
    (expected,) = torch.autograd.grad(compute_loss(x), x)
    assert relative_error(vmap(grad(compute_loss))(x.detach()), expected) < 1e-2  # its gains are 16 bit, too
    assert not compute_loss(x).isnan()  # eager mode goes on


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_sharded_first", [False, True])
def test_sharded_modules_are_low_and_in_float32_alike(is_sharded_first, mesh):
    def shard(net: ThreeReaders) -> None:
        for part in (net.norm, net.readers[0], net):
            fully_shard(part, mesh=mesh)

    def change(net: ThreeReaders) -> list:
        island = net.readers[0]
        return [keep_norms_low(net, "cpu", skip=[island]), Float32Islands([island], "cpu")]

    def train(net: ThreeReaders) -> list[Tensor]:
        with autocast():
            output = net(make_input())
        output.float().square().sum().backward()
        return [output.detach(), *(getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in net.parameters())]

    plain = ThreeReaders(make_norm("LayerNorm"))
    net = copy.deepcopy(plain)
    change(plain)
    steps = [shard, change] if is_sharded_first else [change, shard]
    (handles,) = filter(None, [step(net) for step in steps])
    for got, expected in zip(train(net), train(plain), strict=True):
        assert torch.equal(got, expected)
    for handle in handles:
        handle.remove()
    assert not any(is_changed(part) for part in net.modules())
