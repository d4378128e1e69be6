"""Linked pairs train as the plain modules do, keep one map a stage, and leave no trace."""

import copy
import io
import pickle
import re
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.multiprocessing as mp
from support.helpers import assert_equal_weights, describe_module, saved_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.in_place_fusion.inplace_abn import (
    CHECK_EVERY_N_FORWARDS,
    InPlaceABNHandle,
    apply_inplace_abn,
)
from lightning_vram.techniques.in_place_fusion.recomputation.stage import Recomputation

C = 8
WAY_OUT = "Use LeakyReLU, or leave the pair to the recomputation of InPlaceFusion, which needs no inverse."


@dataclass
class Link:
    producer: nn.Module
    consumer: nn.Module


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


def link(chain: nn.Sequential, **kwargs) -> InPlaceABNHandle:
    return apply_inplace_abn(links_of(chain), **kwargs)


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
    "leaky": {},
    "leaky in place": {"activation": nn.LeakyReLU(0.2, inplace=True)},
    "elu": {"activation": nn.ELU(0.5)},
    "elu in place": {"activation": nn.ELU(inplace=True)},
    "identity": {"activation": nn.Identity()},
    "not affine": {"affine": False},
    "cumulative": {"momentum": None},
    "not tracked": {"track_running_stats": False},
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_the_plain_chain(kind, training):
    plain = make_chain(**KINDS[kind]).double().train(training)
    ours = copy.deepcopy(plain)
    handle = link(ours)
    assert_equal_training(ours, plain, image().double())
    assert (handle.num_links, handle.num_fallen_back) == (3, 0)


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


def test_without_a_gradient_the_modules_are_the_plain_ones():
    chain = make_chain()
    expected = make_chain()
    link(chain)
    norm = chain[1]
    for training in (True, False):
        chain.train(training)
        expected.train(training)
        with torch.no_grad():
            assert torch.equal(norm(image()), expected[1](image()))
            assert torch.equal(chain(image()), expected(image()))
    assert_equal_weights(chain, expected)


class Shared(nn.Module):
    """One activation for two norms, and for a sum that no norm made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(C, C, 1), nn.Conv2d(C, C, 1)
        self.norm, self.other_norm = nn.BatchNorm2d(C), nn.BatchNorm2d(C)
        self.activation = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        z = self.activation(self.other_norm(self.second(y)))
        return self.activation(z - x)


def test_an_activation_may_serve_several_norms_and_other_tensors():
    plain = Shared().double()
    ours = copy.deepcopy(plain)
    apply_inplace_abn([Link(ours.norm, ours.activation), Link(ours.other_norm, ours.activation)])
    assert_equal_training(ours, plain, image().double())


def test_a_forward_that_was_interrupted_leaves_nothing_behind():
    plain = Shared().double()
    ours = copy.deepcopy(plain)
    apply_inplace_abn([Link(ours.norm, ours.activation)])
    ours.norm(image().double().requires_grad_())
    plain.norm(image().double())
    assert_equal_training(ours, plain, image().double())


def test_an_output_that_misses_its_activation_is_an_error_and_not_a_wrong_result():
    chain = make_chain(1)
    link(chain)
    activated = chain[1](chain[0](image()))
    message = (
        "LeakyReLU(negative_slope=0.01) got a tensor that is not the output of the batch norm before it, which is "
        "activated already. Link only norms whose output goes to the activation, unchanged and first."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        chain[2](activated * 2)
    assert chain[2](activated.view_as(activated)) is not activated  # an alias is known again


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_around_it_the_gradient_stays(use_reentrant):
    plain = make_chain().double()
    ours = copy.deepcopy(plain)
    link(ours)
    x = image().double().requires_grad_()
    gradients = []
    for model in (plain, ours):
        checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_our_checkpointing_goes_around_linked_modules():
    plain = nn.Sequential(make_chain(1), make_chain(1)).double()
    ours = copy.deepcopy(plain)
    handles = [link(block) for block in ours] + [apply_activation_checkpointing(ours, layers=["0", "1"])]
    assert_equal_training(ours, plain, image().double())
    for handle in handles:
        handle.remove()
    assert describe_module(ours) == describe_module(plain)


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize("part", ["whole", "norm", "activation"])
def test_compiled_in_whole_or_in_part_it_breaks_the_graph_and_stays_right(part):
    plain = make_chain(2).double()
    ours = copy.deepcopy(plain)
    handle = link(ours)
    norm = ours[1]
    if part == "whole":
        ours.compile(backend="aot_eager")
    else:
        ours[1 if part == "norm" else 2].compile(backend="aot_eager")
    for _ in range(2):
        loss, expected = loss_of(ours, image().double()), loss_of(plain, image().double())
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
    assert vars(norm)["_invertible_norms"].num_forwards == 2
    assert handle.num_fallen_back == 0
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)
    assert_equal_weights(ours, plain)


def test_functional_transforms_see_the_plain_modules():
    chain = make_chain(1).double().eval()
    link(chain)
    parameters = dict(chain.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(chain, parameters, (image().double(),)).square().mean()

    gradients = torch.func.grad(loss)(parameters)
    loss_of(chain, image().double()).backward()
    for name, parameter in chain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_copies_and_pickles_are_plain_modules():
    chain = make_chain()
    plain = describe_module(chain)
    keys = list(chain.state_dict())
    link(chain)
    assert list(chain.state_dict()) == keys
    assert [name for name, _ in chain.named_parameters()] == [name for name, _ in make_chain().named_parameters()]
    file = io.BytesIO()
    torch.save(chain, file)
    file.seek(0)
    loss_of(chain, image())
    for other in (
        copy.deepcopy(chain),
        copy.copy(chain[1]),
        pickle.loads(pickle.dumps(chain)),
        torch.load(file, weights_only=False),
    ):
        assert describe_module(other) == (plain if len(list(other.modules())) > 1 else describe_module(make_chain()[1]))


def test_the_undo_leaves_no_trace_and_a_second_run_works():
    chain = make_chain().double()
    plain = copy.deepcopy(chain)
    before = describe_module(chain)
    for _ in range(2):
        handle = link(chain)
        assert str(chain) == str(plain)
        assert_equal_training(chain, plain, image().double(), num_steps=1)
        handle.remove()
        handle.remove()
        assert describe_module(chain) == before


def test_cheap_operators_may_be_recomputed_around_it():
    plain = make_chain().double()
    ours = copy.deepcopy(plain)
    link(ours)
    x = image().double()
    loss_of(plain, x).backward()
    with Recomputation(ours, min_bytes=0, verify="never"):
        loss = loss_of(ours, x)
    loss.backward()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


def test_fake_tensors_keep_as_much_as_real_ones():
    kept = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            chain = make_chain()
            handle = link(chain)
            x = torch.randn(4, C, 6, 6)
            with track_memory(chain, inputs=x) as tracker:
                loss_of(chain, x).backward()
        kept.append(tracker.timeline.saved_for_backward_bytes)
        assert handle.num_fallen_back == 0
    assert kept[0] == kept[1]


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
    assert handle.num_fallen_back == 0
    loss_of(chain, image())
    assert handle.num_fallen_back == 1
    expected = copy.deepcopy(chain)
    assert_equal_training(chain.double(), expected.double(), image().double())
    with torch.no_grad():
        chain[1].weight[3] = 1.0
    assert torch.equal(chain(image().double()), copy.deepcopy(chain)(image().double()))
    assert handle.num_fallen_back == 1


def test_the_first_forward_checks_for_the_dtype_it_finds():
    chain = make_chain(1)
    nn.init.constant_(chain[1].weight, 0.1)
    nn.init.constant_(chain[1].bias, 1.0)  # predicted: 6e-7 in float32, 3.9e-2 in bfloat16
    handle = link(chain)
    loss_of(chain, image())
    assert handle.num_fallen_back == 0
    handle.remove()
    handle = link(chain)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(chain, image())
    assert handle.num_fallen_back == 1


# --- what is refused ---

NAME = "link 0, BatchNorm2d(8) followed by "
REFUSED = {
    "relu": (nn.ReLU(), "ReLU(): ReLU cannot be inverted: it drops negative values."),
    "relu6": (nn.ReLU6(), "ReLU6(): ReLU6 cannot be inverted: it drops negative values."),
    "silu": (nn.SiLU(), "SiLU(): SiLU cannot be inverted: its output does not determine its input."),
    "gelu": (nn.GELU(), "GELU(approximate='none'): GELU cannot be inverted: its output does not determine its input."),
    "zero": (
        nn.LeakyReLU(0.0),
        "LeakyReLU(negative_slope=0.0): with negative_slope=0.0 it cannot be inverted; it must be above 0.",
    ),
    "negative": (
        nn.LeakyReLU(-0.1),
        "LeakyReLU(negative_slope=-0.1): with negative_slope=-0.1 it cannot be inverted; it must be above 0.",
    ),
    "elu": (nn.ELU(0.0), "ELU(alpha=0.0): with alpha=0.0 it cannot be inverted; it must be above 0."),
}


def assert_refused(message: str, links: list, **kwargs) -> None:
    before = [describe_module(module) for one in links for module in (one.producer, one.consumer)]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        apply_inplace_abn(links, **kwargs)
    assert [describe_module(module) for one in links for module in (one.producer, one.consumer)] == before


@pytest.mark.parametrize("kind", REFUSED)
def test_an_activation_that_cannot_be_inverted_is_refused(kind):
    activation, reason = REFUSED[kind]
    assert_refused(f"{NAME}{reason} {WAY_OUT}", links_of(make_chain(1, activation)))


def test_a_norm_of_another_kind_is_refused():
    message = (
        "link 0, GroupNorm() followed by Identity(): GroupNorm() does not run as a batch norm of torch.nn. "
        "Link BatchNorm1d, BatchNorm2d, BatchNorm3d or SyncBatchNorm."
    )
    assert_refused(message, [Link(nn.GroupNorm(2, C), nn.Identity())])


def test_a_norm_whose_forward_was_replaced_is_refused():
    chain = make_chain(1)
    chain[1].forward = lambda x: x
    message = (
        f"{NAME}LeakyReLU(negative_slope=0.01): forward was replaced on the instance of BatchNorm2d(8). "
        "Leave the pair out."
    )
    assert_refused(message, links_of(chain))


def test_a_norm_linked_twice_is_refused():
    chain = make_chain(1)
    message = (
        "link 1, BatchNorm2d(8) followed by LeakyReLU(negative_slope=0.01): BatchNorm2d(8) is linked already. "
        "Link each norm once, to one activation."
    )
    assert_refused(message, links_of(chain) * 2)
    handle = link(chain)
    assert_refused(message.replace("link 1", "link 0"), links_of(chain))
    handle.remove()


@pytest.mark.parametrize(
    ("gamma", "kwargs", "reason"),
    [
        (
            -1e-5,
            {},
            "with gamma down to 1e-05 in float32, its input is recovered with a predicted relative error of 0.006, "
            "above 0.001",
        ),
        (
            0.1,
            {"dtype": torch.bfloat16},
            "with gamma down to 0.1 in bfloat16, its input is recovered with a predicted relative error of 0.039, "
            "above 0.02",
        ),
        (
            0.0,
            {},
            "with gamma down to 0 in float32, its input is recovered with a predicted relative error of inf, "
            "above 0.001",
        ),
        (
            1.0,
            {"max_error": 1e-9},
            "with gamma down to 1 in float32, its input is recovered with a predicted relative error of 8.4e-08, "
            "above 1e-09",
        ),
    ],
)
def test_a_small_gamma_is_refused(gamma, kwargs, reason):
    chain = make_chain(1)
    nn.init.constant_(chain[1].bias, 1.0)
    with torch.no_grad():
        chain[1].weight[5] = gamma
    message = (
        f"{NAME}LeakyReLU(negative_slope=0.01): {reason}. Train in float32, raise max_error, or leave the pair to the "
        "recomputation of InPlaceFusion, which is exact."
    )
    assert_refused(message, links_of(chain), **kwargs)


def test_a_limit_that_is_not_positive_is_refused():
    assert_refused("apply_inplace_abn(max_error) must be positive, got 0.", [], max_error=0)


def test_any_object_with_two_attributes_is_a_link():
    chain = make_chain(1)
    handle = apply_inplace_abn([SimpleNamespace(producer=chain[1], consumer=chain[2])])
    assert handle.num_links == 1


# --- SyncBatchNorm ---


def run_rank(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    chain = nn.SyncBatchNorm.convert_sync_batchnorm(make_chain(2).double())
    layers = list(chain)
    apply_inplace_abn([Link(layers[1], layers[2]), Link(layers[4], layers[5])])
    x = image(8, C, 4, 4).double()
    for _ in range(2):
        chain(x[:3] if rank == 0 else x[3:]).square().sum().backward()
    torch.save((chain.state_dict(), [p.grad for p in chain.parameters()]), f"{path}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.distributed
def test_two_processes_train_as_one_on_the_joint_batch(tmp_path):
    mp.start_processes(run_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    plain = make_chain(2).double()
    for _ in range(2):
        plain(image(8, C, 4, 4).double()).square().sum().backward()
    (state, gradients), (other_state, other_gradients) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, expected in plain.state_dict().items():
        assert torch.equal(state[name], other_state[name])
        torch.testing.assert_close(state[name], expected, rtol=1e-10, atol=1e-12)
    for one, other, parameter in zip(gradients, other_gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(one + other, parameter.grad, rtol=1e-9, atol=1e-9)


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
    assert handle.num_fallen_back == 0
    handle.remove()
    assert torch.equal(loss_of(ours, x), loss_of(plain, x))


def test_a_sync_norm_alone_trains_as_a_batch_norm():
    plain = make_chain(1).double()
    ours = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    handle = apply_inplace_abn([Link(ours[1], ours[2])])
    assert_equal_training(ours, plain, image().double())
    assert handle.num_fallen_back == 0
