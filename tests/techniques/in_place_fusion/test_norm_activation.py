"""A fused norm and activation keep one map instead of two; everything is equal to the bit."""

import copy
import pickle

import pytest
import torch
from support.helpers import saved_bytes
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_vram.techniques.in_place_fusion.norm_activation import FUSED_ACTIVATIONS, fuse_norm_activations

C = 6
NORMS = {
    "batch": lambda: nn.BatchNorm2d(C),
    "frozen": lambda: nn.BatchNorm2d(C).eval(),
    "no affine": lambda: nn.BatchNorm2d(C, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(C, track_running_stats=False),
    "group": lambda: nn.GroupNorm(2, C),
    "layer": lambda: nn.LayerNorm([C, 8, 8]),
    "rms": lambda: nn.RMSNorm([8]),
}


def make(norm: str, activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), NORMS[norm](), activation, nn.Conv2d(C, C, 1))
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0.5, 0.3)
    return net


def check(plain: nn.Sequential, ours: nn.Sequential, *, dtype: torch.dtype | None = None) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, 8, 8)
        losses = []
        for net in (plain, ours):
            net.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = net(x).float().square().mean()
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        for a, b in zip(plain.buffers(), ours.buffers(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bf16 autocast"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_every_norm_gives_the_same_bits(norm: str, dtype: torch.dtype | None) -> None:
    plain = make(norm, nn.SiLU())
    ours = copy.deepcopy(plain)
    handle = fuse_norm_activations(ours)
    check(plain, ours, dtype=dtype)
    assert handle.num_fused == 3


@pytest.mark.parametrize("kind", FUSED_ACTIVATIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_every_activation_gives_the_same_bits(kind: type[nn.Module], inplace: bool) -> None:
    try:
        activation = kind(inplace=inplace)
    except TypeError:
        activation = kind()
    plain = make("batch", activation)
    ours = copy.deepcopy(plain)
    fuse_norm_activations(ours)
    check(plain, ours)


def test_the_output_of_the_norm_is_not_kept() -> None:
    """Plain: image, norm input, norm output, activation; fused: all but the norm's output."""
    x = torch.randn(2, 3, 8, 8)
    image, norm_map = 2 * 3 * 64 * 4, 2 * C * 64 * 4
    plain = make("batch", nn.SiLU())
    running = 2 * C * 4
    assert saved_bytes(plain, lambda: plain(x).sum()) == image + 3 * norm_map + 2 * C * 4 + running
    fuse_norm_activations(plain)
    assert saved_bytes(plain, lambda: plain(x).sum()) == image + 2 * norm_map + 2 * C * 4 + running


def test_double_backward_is_equal_up_to_rounding() -> None:
    plain = make("group", nn.SiLU())
    ours = copy.deepcopy(plain)
    fuse_norm_activations(ours)
    for net in (plain, ours):
        x = torch.ones(2, 3, 8, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(net(x * x).square().mean(), x, create_graph=True)
        grad.square().sum().backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_shared_activation_still_activates_what_the_norm_did_not() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(3, C, 1), nn.BatchNorm2d(C), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.norm(self.conv(x)))
            return self.act(y + 1)

    plain = Net()
    ours = copy.deepcopy(plain)
    fuse_norm_activations(ours)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(plain(x), ours(x))
    with torch.no_grad():
        assert torch.equal(plain(x), ours(x))


def test_the_output_of_the_norm_is_what_it_was_for_all_other_readers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(3, C, 1), nn.BatchNorm2d(C), nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            z = self.act(y) + y
            w = self.norm(self.conv(x))
            w = w.mul_(2)  # not what the norm made any more
            return self.act(w) + z.sin()

    plain = Net()
    ours = copy.deepcopy(plain)
    handle = fuse_norm_activations(ours)
    x = torch.randn(2, 3, 8, 8)
    for net in (plain, ours):
        net(x).square().sum().backward()
    assert handle.num_fused == 1
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_an_activation_that_keeps_its_output_is_left_alone() -> None:
    net = make("batch", nn.ReLU())
    handle = fuse_norm_activations(net)
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    assert handle.num_fused == 0
    assert type(net[2]) is nn.ReLU


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_and_inference_run_the_plain_modules() -> None:
    net = make("layer", nn.SiLU())
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = net(x)
    handle = fuse_norm_activations(net)
    with torch.no_grad():
        assert torch.equal(net(x), expected)
    with forward_ad.dual_level():
        net(forward_ad.make_dual(x, torch.ones_like(x)))
    assert handle.num_fused == 0


def test_copies_and_pickles_are_plain_and_removal_leaves_nothing() -> None:
    net = make("batch", nn.SiLU())
    handle = fuse_norm_activations(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert [type(module) for module in twin] == [nn.Conv2d, nn.BatchNorm2d, nn.SiLU, nn.Conv2d]
        assert "_fused_module" not in vars(twin[1])
    handle.remove()
    assert [type(module) for module in net] == [nn.Conv2d, nn.BatchNorm2d, nn.SiLU, nn.Conv2d]
    assert "_fused_module" not in vars(net[1])
