"""What a backward magnifies an error of is kept exactly, and other activations are not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_vram.core.hooks import exact_only
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

SIDE = 32
INDEX = torch.arange(SIDE).flip(0)

# Each reads ``x``, an activation, and gives NaN or a wrong gradient where that is stored with an error.
MAGNIFY: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(0),
    "aminmax": lambda x: torch.cat(torch.aminmax(x, dim=1)),
    "max of all": lambda x: x.max(),
    "infinity norm": lambda x: x.norm(float("inf"), -1),
    "sum of magnitudes": lambda x: x.norm(1, -1),
    "vector norm": lambda x: torch.linalg.vector_norm(x, float("inf"), -1),
    "scatter_reduce": lambda x: torch.zeros(4, SIDE).scatter_reduce(0, INDEX[:, None] % 4 + 0 * INDEX, x, "amax"),
    "scatter_reduce in place": lambda x: (x * 1).scatter_reduce_(0, INDEX[:, None] + 0 * INDEX, x.flip(0), "amax"),
    "index_reduce": lambda x: torch.zeros(SIDE, SIDE).index_reduce(0, INDEX, x, "amin"),
    "denominator": lambda x: 1 / (x.abs() + 1e-4),
    "remainder": lambda x: torch.full_like(x, 3.0) % (x.abs() + 0.01),
    "log": lambda x: (x.abs() + 1e-6).log(),
    "log in place": lambda x: (x.abs() + 1e-6).log_(),
    "log1p": lambda x: (x.abs() + 1e-4 - 1).log1p(),
    "square root": lambda x: (x.abs() + 1e-6).sqrt(),
    "power": lambda x: (x.abs() + 1e-6) ** 0.5,
    "negative power": lambda x: (x.abs() + 1e-4) ** -1,
    "logit": lambda x: x.sigmoid().logit(),
    "logsumexp": lambda x: (x * 20).logsumexp(-1),
    "log_softmax": lambda x: (x * 20).log_softmax(-1),
    "binary cross-entropy": lambda x: F.binary_cross_entropy((x * 5).sigmoid(), torch.ones_like(x)),
    "kl_div": lambda x: F.kl_div(x.detach(), x.abs() + 0.01, reduction="sum"),
    "abs": lambda x: x.abs(),
    "product": lambda x: x.prod(),
    "solve": lambda x: torch.linalg.solve(x + 3 * torch.eye(SIDE), torch.ones(SIDE, 1)),
}
DIFFERENTIABLE = [name for name in MAGNIFY if name != "aminmax" or torch.__version__ >= (2, 12)]


def activation() -> tuple[Tensor, Tensor]:
    scales = torch.logspace(-3, 1, SIDE)[:, None]
    x = (torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0)) * scales).requires_grad_()
    return x, x * 1.0


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_what_would_be_magnified_is_exact(name: str) -> None:
    x, y = activation()
    (expected,) = torch.autograd.grad(MAGNIFY[name](y).sum(), x)
    for lossy in ("bf16", "int8"):
        with CompressionStage(lossy=lossy, min_bytes=0):
            loss = MAGNIFY[name](x * 1.0).sum()
        assert torch.allclose(torch.autograd.grad(loss, x)[0], expected, rtol=0.02, atol=1e-6, equal_nan=True)


def test_what_was_given_up_is_handed_on_as_a_whole_also_for_a_part() -> None:
    for part in (lambda y: y, lambda y: y[4:20], lambda y: y.t()):
        x, y = activation()
        expected = torch.autograd.grad(part(y).amax(-1).sum(), x)[0]
        offloading = ActivationOffloading(min_offload_bytes=1)
        with offloading, CompressionStage(lossy="int8", min_bytes=0) as stage:
            loss = part(x * 1.0).amax(-1).sum()
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        assert stage.report.kept_bytes == 0


def test_a_tensor_given_up_and_saved_again_is_kept_once() -> None:
    x, y = activation()
    with CompressionStage(lossy="int8", min_bytes=0) as stage:
        y = x * 1.0
        first = y.sin()
        largest = y.amax()
        second = y.cos()
    assert stage.report.kept_bytes == SIDE * SIDE * 4 + 4  # y, and the result of amax
    stored = torch.autograd.grad(first.sum() + largest + second.sum(), x)[0]
    assert torch.equal(stored, torch.autograd.grad(x.sin().sum() + x.amax() + x.cos().sum(), x)[0])


class OfWeights(nn.Module):
    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.randn(SIDE, SIDE)), make

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.make(self.weight)


WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(SIDE, SIDE)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(SIDE, SIDE)).eval(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(SIDE, SIDE)),
    "normalized": lambda: OfWeights(lambda w: F.normalize(w)),
    "scaled view": lambda: OfWeights(lambda w: w.t() * 0.5),
    "standardized": lambda: OfWeights(lambda w: (w - w.mean(1, keepdim=True)) * (w.var(1, keepdim=True) + 1).rsqrt()),
    "split": lambda: OfWeights(lambda w: torch.cat([part * 2 for part in w.split(8)])),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_what_is_made_of_weights_is_exact(name: str) -> None:
    torch.manual_seed(0)
    net, x = WEIGHTS[name](), torch.randn(SIDE, SIDE, requires_grad=True)
    expected = torch.autograd.grad(net(x).sin().sum(), [x, *net.parameters()])
    with CompressionStage(net, lossy="int8", min_bytes=0) as stage:
        y = net(x)
    assert not stage.report.kinds["int8"]
    assert all(map(torch.equal, torch.autograd.grad(y.sin().sum(), [x, *net.parameters()]), expected))


def test_views_of_weights_cast_by_autocast_are_exact() -> None:
    net, x = OfWeights(lambda w: w.t()), torch.randn(SIDE, SIDE)
    with CompressionStage(net, lossy="int8", min_bytes=0) as stage, torch.autocast("cpu", torch.bfloat16):
        net(x)
    assert not stage.report.kinds["int8"]


def test_a_denominator_made_of_a_statistic_is_exact_and_what_is_divided_is_not() -> None:
    x, _ = activation()
    expected = torch.autograd.grad(F.normalize(x * 1.0).sin().sum(), x)[0]
    with CompressionStage(lossy="int8", min_bytes=0) as stage:
        y = F.normalize(x * 1.0)
    assert stage.report.kinds["int8"] == 1
    assert F.cosine_similarity(torch.autograd.grad(y.sin().sum(), x)[0], expected, dim=-1).min() > 0.99


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_inputs_of_checkpoints_are_exact(use_reentrant: bool) -> None:
    x, _ = activation()
    with CompressionStage(lossy="int8", min_bytes=0) as stage:
        y = checkpoint(torch.sin, x * 1.0, use_reentrant=use_reentrant)
    assert not stage.report.kinds["int8"]
    with CompressionStage(lossy="int8", min_bytes=0) as stage, exact_only:
        (x * 1.0).sin()
    assert not stage.report.kinds["int8"]
    y.sum().backward()
    assert torch.equal(x.grad, x.cos().detach())
