"""Linked pairs train as the plain modules do, keep one map a stage, and leave no trace."""

import copy
import pickle
import re

import pytest
import torch
from support.helpers import assert_equal_weights, describe_module, saved_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.in_place_fusion.observed_links import Link
from lightning_vram.techniques.in_place_fusion.policy import (
    CHECK_EVERY_N_FORWARDS,
    Pairs,
    apply_inplace_abn,
    can_invert,
)

C = 8


def num_off(handle: Pairs) -> int:
    return sum(pair.is_off for pair in handle.pairs)


def make_chain(num_stages: int = 3, activation: nn.Module | None = None, **kwargs) -> nn.Sequential:
    """Stages of convolution, norm and activation, and a last convolution."""
    torch.manual_seed(0)
    activation = activation if activation is not None else nn.LeakyReLU(0.01)
    stages = (
        (nn.Conv2d(C, C, 3, padding=1, bias=False), nn.BatchNorm2d(C, **kwargs), copy.deepcopy(activation))
        for _ in range(num_stages)
    )
    return nn.Sequential(*(layer for stage in stages for layer in stage), nn.Conv2d(C, C, 1))


def links_of(chain: nn.Sequential) -> list[Link]:
    layers = list(chain)
    return [Link(layer, layers[i + 1]) for i, layer in enumerate(layers) if isinstance(layer, nn.BatchNorm2d)]


def link(chain: nn.Sequential) -> Pairs:
    return apply_inplace_abn(links_of(chain))


def image(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*(shape or (4, C, 6, 6)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def assert_equal_training(ours: nn.Module, plain: nn.Module, x: Tensor, num_steps: int = 3) -> None:
    """Output and buffers to the bit; gradients as close as float64 lets them be. Weights are put in step each time."""
    for _ in range(num_steps):
        for model in (ours, plain):
            model.zero_grad()
        loss, expected = loss_of(ours, x), loss_of(plain, x)
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        for (name, one), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
            with torch.no_grad():
                for parameter in (one, other):
                    parameter.sub_(other.grad, alpha=0.1)
        assert_equal_weights(ours, plain)


KINDS = {
    "leaky in place": {"activation": nn.LeakyReLU(0.2, inplace=True)},
    "elu": {"activation": nn.ELU(0.5)},
    "not affine": {"affine": False},
    "cumulative": {"momentum": None},
    "not tracked": {"track_running_stats": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_the_plain_chain(kind):
    plain = make_chain(**KINDS[kind]).double()
    ours = copy.deepcopy(plain)
    handle = link(ours)
    assert_equal_training(ours, plain, image().double())
    assert (len(handle.pairs), num_off(handle)) == (3, 0)


def test_the_chain_keeps_seven_maps_instead_of_nineteen_or_thirteen():
    """Six stages. Plain: the first input, and a stage's convolution, norm and activation results; in place: one less.

    Linked: the first input and one map a stage. Beside the maps, plain norms keep mean and 1 / deviation, and by
    autograd's account their two running statistics; linked ones keep 1 / deviation.
    """
    x = image()
    maps = {"plain": 1 + 3 * 6, "in place": 1 + 2 * 6, "linked": 1 + 6}
    for kind, num_maps in maps.items():
        chain = make_chain(6, nn.LeakyReLU(0.01, inplace=kind == "in place"))
        if kind == "linked":
            link(chain)
        num_vectors, num_buffers = (1, 0) if kind == "linked" else (2, 2)
        vector_bytes = 6 * C * 4
        expected = num_maps * x.nbytes + num_vectors * vector_bytes
        assert saved_bytes(chain, lambda chain=chain: chain(x).sum()) == expected + num_buffers * vector_bytes
        with track_memory(chain, inputs=x) as tracker:
            chain(x).sum().backward()
        scalars_bytes = 2 * 4  # the loss and its gradient; the input is counted apart
        assert tracker.timeline.saved_for_backward_bytes == expected - x.nbytes + scalars_bytes


def test_an_output_that_misses_its_activation_is_an_error_and_not_a_wrong_result():
    chain = make_chain(1)
    link(chain)
    activated = chain[1](chain[0](image()))
    message = (
        f"{chain[2]} got another tensor than the output of {chain[1]}, which has done its work. "
        "fold_frozen_bn and abn need a model that takes the same path in every step: leave them out."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        chain[2](activated * 2)
    activated = chain[1](chain[0](image()))
    alias = activated.view_as(activated)
    assert chain[2](alias) is alias


def test_checkpointed_around_it_the_gradient_stays():
    plain = make_chain().double()
    ours = copy.deepcopy(plain)
    link(ours)
    x = image().double().requires_grad_()
    gradients = []
    for model in (plain, ours):
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_it_breaks_the_graph_and_stays_right():
    plain = make_chain(1).double()
    ours = copy.deepcopy(plain)
    handle = link(ours)
    ours.compile(backend="eager")
    assert_equal_training(ours, plain, image().double(), num_steps=2)
    assert vars(ours[1])["_invertible_norms"].num_forwards == 2
    assert num_off(handle) == 0


def test_copies_and_pickles_are_plain_modules_and_the_undo_leaves_no_trace():
    chain = make_chain().double()
    plain, before = copy.deepcopy(chain), describe_module(chain)
    for _ in range(2):
        handle = link(chain)
        assert list(chain.state_dict()) == list(plain.state_dict())
        assert str(chain) == str(plain)
        for twin in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
            assert describe_module(twin) == before
        assert_equal_training(chain, plain, image().double(), num_steps=1)
        handle.remove()
        handle.remove()
        assert describe_module(chain) == before


# --- gamma that moves ---


def test_a_pair_whose_gamma_left_the_safe_range_falls_back_at_the_next_check():
    chain = make_chain(2)
    handle = link(chain)
    loss_of(chain, image())
    with torch.no_grad():
        chain[1].weight[3] = 1e-6
        chain[1].bias[3] = 0.5  # at zero, no gamma is too small: rounding is relative to beta
    for _ in range(CHECK_EVERY_N_FORWARDS - 1):
        loss_of(chain, image())
    assert num_off(handle) == 0
    loss_of(chain, image())
    assert num_off(handle) == 1
    expected = copy.deepcopy(chain)
    assert_equal_training(chain.double(), expected.double(), image().double())
    with torch.no_grad():
        chain[1].weight[3] = 1.0
    assert torch.equal(chain(image().double()), copy.deepcopy(chain)(image().double()))
    assert num_off(handle) == 1


def test_the_first_forward_checks_for_the_dtype_it_finds():
    chain = make_chain(1)
    nn.init.constant_(chain[1].weight, 0.1)
    nn.init.constant_(chain[1].bias, 1.0)  # an error of 2e-7 in float32, and of 1.6e-2 in bfloat16
    handle = link(chain)
    loss_of(chain, image())
    assert num_off(handle) == 0
    handle.remove()
    handle = link(chain)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(chain, image())
    assert num_off(handle) == 1


def test_a_gamma_of_zero_is_off_from_the_first_forward_on():
    chain = make_chain(2)
    plain = copy.deepcopy(chain)
    for model in (chain, plain):
        nn.init.zeros_(model[4].weight)
    handle = link(chain)
    assert_equal_training(chain.double(), plain.double(), image().double(), num_steps=1)
    assert [pair.is_off for pair in handle.pairs] == [False, True]


# --- what is refused ---

REFUSED = {
    "relu": (nn.BatchNorm2d(C), nn.ReLU()),
    "silu": (nn.BatchNorm2d(C), nn.SiLU()),
    "no activation": (nn.BatchNorm2d(C), nn.Identity()),
    "a slope of zero": (nn.BatchNorm2d(C), nn.LeakyReLU(0.0)),
    "a negative slope": (nn.BatchNorm2d(C), nn.LeakyReLU(-0.1)),
    "an elu that is constant below zero": (nn.BatchNorm2d(C), nn.ELU(0.0)),
    "another norm": (nn.GroupNorm(2, C), nn.LeakyReLU()),
    "statistics shared by processes": (nn.SyncBatchNorm(C), nn.LeakyReLU()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_some_pairs_can_never_be_inverted(reason):
    assert not can_invert(Link(*REFUSED[reason]))
    assert can_invert(Link(nn.BatchNorm1d(C), nn.ELU()))


# --- shards ---


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_under_fsdp2_norm_and_activation_may_lie_in_different_shards(mesh):
    plain = make_chain(2).double()
    ours = copy.deepcopy(plain)
    handle = link(ours)
    for layer in ours:
        fully_shard(layer, mesh=mesh)
    fully_shard(ours, mesh=mesh)
    x = image().double()
    for model in (ours, plain):
        loss_of(model, x).backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-9, atol=1e-12)
    assert num_off(handle) == 0
    handle.remove()
    assert torch.equal(loss_of(ours, x), loss_of(plain, x))
