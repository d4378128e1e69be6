"""A convolution that does the work of the frozen norm behind it trains both as before, and keeps less for it."""

import copy
import pickle
from typing import Any

import pytest
import torch
from support.helpers import describe_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.in_place_fusion.observed_links import Link, StepObserver
from lightning_vram.techniques.in_place_fusion.policy import BATCH_NORMS, CONVOLUTIONS, can_fold, fold_frozen_batch_norm
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "strided": {"stride": 2, "groups": 2},
    "dilated": {"dilation": 2, "groups": 4},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "same": {"padding": "same"},
}


def randomise(norm: nn.Module) -> nn.Module:
    """Statistics and affine parameters of a net that was trained."""
    torch.manual_seed(3)
    for tensor in (norm.running_mean, norm.weight, norm.bias):
        if tensor is not None:
            nn.init.normal_(tensor, 0.5, 0.7)
    if norm.running_var is not None:
        nn.init.uniform_(norm.running_var, 0.1, 3.0)
    return norm


def pair(conv: nn.Module, norm: nn.Module | None = None) -> nn.Sequential:
    dims = len(conv.kernel_size)
    norm = norm if norm is not None else NORMS[dims](conv.out_channels)
    return nn.Sequential(conv, randomise(norm).eval()).double()


def fold(net: nn.Sequential) -> Any:
    return fold_frozen_batch_norm([Link(net[0], net[1])])


def data(dims: int, channels: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(2, channels, *((7, 6, 5)[:dims]), dtype=dtype)


def step(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, and gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = net(x)
    wanted = [x, *(p for p in net.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y.square().sum() + y.sum(), wanted)]


def check_equal(net: nn.Sequential, x: Tensor) -> None:
    plain = copy.deepcopy(net)
    fold(net)
    folded = step(net, x)
    assert net[1](net_output := net[0](x)) is net_output  # else nothing was folded
    for ours, theirs in zip(folded, step(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10 * float(theirs.abs().max()))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_every_convolution_gives_the_same_output_and_gradients(dims: int, option: str) -> None:
    torch.manual_seed(0)
    check_equal(pair(CONVS[dims](4, 8, 3, **OPTIONS[option])), data(dims))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(6, affine=False), nn.SyncBatchNorm(6, eps=0.1)], ids=str)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_norms_without_parameters_or_gradients_are_folded(norm: nn.Module, is_frozen: bool) -> None:
    net = pair(nn.Conv2d(4, 6, 3), copy.deepcopy(norm))
    net[1].requires_grad_(not is_frozen)
    check_equal(net, data(2))


def test_parameters_are_read_live() -> None:
    net = pair(nn.Conv2d(4, 6, 3))
    plain = copy.deepcopy(net)
    fold(net)
    for member in (net, plain):
        with torch.no_grad():
            for tensor in (*member.parameters(), member[1].running_mean, member[1].running_var):
                tensor.mul_(1.5)
    torch.testing.assert_close(net(data(2)), plain(data(2)), rtol=1e-10, atol=1e-10)


def test_second_derivatives_are_those_of_the_plain_model() -> None:
    net = pair(nn.Conv2d(2, 2, 2, groups=2))
    fold(net)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(net, x)
    assert torch.autograd.gradgradcheck(net, x)


def test_a_norm_in_training_mode_runs_as_ever() -> None:
    net = pair(nn.Conv2d(4, 6, 3))
    plain = copy.deepcopy(net)
    fold(net)
    for member in (net, plain):
        member.train()
    for ours, theirs in zip(step(net, data(2)), step(plain, data(2)), strict=True):
        assert torch.equal(ours, theirs)
    for (name, ours), theirs in zip(net.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    net.eval(), plain.eval()
    torch.testing.assert_close(net(data(2)), plain(data(2)), rtol=1e-10, atol=1e-10)


def test_under_autocast_the_folding_is_in_float32() -> None:
    torch.manual_seed(0)
    net = pair(nn.Conv2d(4, 6, 3)).float()
    plain, x = copy.deepcopy(net), data(2, dtype=torch.float32)
    exact = step(plain, x)
    fold(net)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = step(net, x), step(plain, x)
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        scale = float(truth.abs().max())
        assert float((a - truth).abs().max()) < 4 * max(float((b - truth).abs().max()), 1e-3 * scale)


def test_copies_are_plain_modules_and_removed_it_is_the_plain_model_to_the_bit() -> None:
    net = pair(nn.Conv2d(4, 6, 3, groups=2))
    plain, before = copy.deepcopy(net), describe_module(net)
    handle = fold(net)
    assert len(handle.pairs) == 1
    assert list(net.state_dict()) == list(plain.state_dict())
    assert repr(net) == repr(plain)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert describe_module(twin) == before
        assert torch.equal(twin(data(2)), plain(data(2)))
    for _ in range(2):
        handle.remove()
        assert describe_module(net) == before
    assert all(torch.equal(a, b) for a, b in zip(step(net, data(2)), step(plain, data(2)), strict=True))


class Scaled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class WithActivation(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


REFUSED = {
    "no running statistics": (nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6, track_running_stats=False)),
    "another number of channels": (nn.Conv2d(4, 6, 1), nn.BatchNorm2d(4)),
    "a convolution of its own": (Scaled(4, 6, 1), nn.BatchNorm2d(6)),
    "a norm of its own": (nn.Conv2d(4, 6, 1), WithActivation(6)),
    "transposed": (nn.ConvTranspose2d(4, 6, 1), nn.BatchNorm2d(6)),
    "linear": (nn.Linear(2, 2), nn.BatchNorm2d(2)),
    "no norm": (nn.Conv2d(1, 1, 1), nn.ReLU()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_some_pairs_can_never_be_folded(reason: str) -> None:
    assert not can_fold(Link(*REFUSED[reason]))


def test_a_patched_forward_and_a_second_folding_are_refused() -> None:
    net = pair(nn.Conv2d(4, 6, 3))
    net[0].forward = lambda x: x
    assert not can_fold(Link(*net))
    del net[0].forward
    assert can_fold(Link(*net))
    good = pair(nn.Conv2d(4, 6, 3))
    fold(net)
    with pytest.raises(ValueError, match="cannot be changed: it already was"):
        fold_frozen_batch_norm([Link(*good), Link(*net)])
    assert type(good[0]) is nn.Conv2d


def test_another_path_than_the_observed_one_is_an_error() -> None:
    net = pair(nn.Conv2d(4, 6, 3))
    fold(net)
    message = (
        r"^BatchNorm2d\(.*\) got another tensor than the output of Conv2d\(.*\), which has done its work. "
        r"fold_frozen_bn and abn need a model that takes the same path in every step: leave them out.$"
    )
    for change in (lambda x: x * 2, lambda x: x.mul_(2)):
        with pytest.raises(RuntimeError, match=message):
            net[1](change(net[0](data(2))))
    with torch.inference_mode():
        assert torch.equal(net(data(2)), net[0](data(2)))


def test_a_checkpointed_pair_folds_in_both_runs() -> None:
    net = pair(nn.Conv2d(4, 6, 3))
    plain = copy.deepcopy(net)
    fold(net)
    checkpoint(net, data(2), use_reentrant=False).sum().backward()
    plain(data(2)).sum().backward()
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_it_breaks_the_graph_and_stays_right() -> None:
    net = pair(nn.Conv2d(4, 6, 3))
    expected = net(data(2))
    fold(net)
    net.compile(backend="eager")
    for _ in range(2):
        torch.testing.assert_close(net(data(2)), expected, rtol=1e-10, atol=1e-10)


def test_under_torch_func_pairs_run_as_ever() -> None:
    net = pair(nn.Conv2d(4, 6, 3))
    parameters = dict(net.named_parameters()) | dict(net.named_buffers())
    expected = torch.func.functional_call(net, parameters, data(2))
    fold(net)
    torch.testing.assert_close(torch.func.functional_call(net, parameters, data(2)), expected)


# Together with recomputation

C, SIZE, NUM_BLOCKS = 8, 16, 4


class Block(nn.Module):
    """The sum of two branches of convolution and norm, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(C, C, 3, padding=1, bias=False), randomise(nn.BatchNorm2d(C))
        self.other_conv, self.other_norm = nn.Conv2d(C, C, 1, bias=False), randomise(nn.BatchNorm2d(C))

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.conv(x)) + self.other_norm(self.other_conv(x))).relu()


def observed_links(net: nn.Module, x: Tensor) -> list[Link]:
    with StepObserver(net, CONVOLUTIONS, BATCH_NORMS) as observer:
        net(x).sum().backward()
    net.zero_grad()
    return observer.links


def kept_bytes(net: nn.Module, x: Tensor) -> int:
    recomputation = Recomputation(net, min_bytes=0)
    for _ in range(2):
        with recomputation:
            loss = net(x).sum()
        loss.backward()
    return recomputation.report.kept_bytes


def test_with_recomputation_half_of_the_convolutions_outputs_are_kept_and_no_folded_weights() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))).eval(), torch.randn(2, C, SIZE, SIZE)
    assert kept_bytes(net, x) == (1 + 2 * NUM_BLOCKS) * x.nbytes  # the input, and what each convolution gives a norm
    handle = fold_frozen_batch_norm(observed_links(net, x))
    assert len(handle.pairs) == 2 * NUM_BLOCKS
    assert kept_bytes(net, x) == (1 + NUM_BLOCKS) * x.nbytes  # the input, and the activation of each block
    handle.remove()
    assert kept_bytes(net, x) == (1 + 2 * NUM_BLOCKS) * x.nbytes
