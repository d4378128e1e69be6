"""Saved tensors take fewer bytes, as many as can be worked out, and no gradient changes by a bit unless asked to."""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from support.helpers import describe_module, saved_bytes
from support.networks import make_network
from techniques.saved_tensors import attention, both, byte_gpt, is_same, lstm
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_vram.core.layers import select_layers
from lightning_vram.demos import DigitsResNet
from lightning_vram.techniques.activation_compression import stage as compression_stage
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

SIDE = 32  # a float tensor of SIDE x SIDE has 4096 bytes: above the threshold of 1024
NUMBER_BYTES = 4
BITS = 32  # bits per number: what a mask shrinks by


class LiveBytes(TorchDispatchMode):
    """The bytes of all memory that operators made inside of it and that is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage()._cdata for arg in tree_leaves(args) if isinstance(arg, Tensor)}
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and (storage := result.untyped_storage())._cdata not in given:
                self.storages[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return results

    def count(self) -> int:
        return sum(size for storage, size in self.storages.values() if storage() is not None)


def live_bytes(compute_loss: Callable[[], Tensor], context: AbstractContextManager) -> int:
    """Bytes that are alive after the forward: its graph."""
    torch.manual_seed(3)
    with LiveBytes() as live:
        with context:
            loss = compute_loss()
        assert loss.requires_grad
        return live.count()


def gradients(compute_loss: Callable[[], Tensor], wanted: list[Tensor], context: AbstractContextManager) -> list:
    torch.manual_seed(3)
    with context:
        loss = compute_loss()
    return [loss.detach(), *torch.autograd.grad(loss, wanted, allow_unused=True), torch.get_rng_state()]


def assert_same_gradients(
    compute_loss: Callable[[], Tensor], wanted: list[Tensor], **options: object
) -> CompressionStage:
    """Gradients are equal to plain ones to the bit, twice, and no more bytes are alive. Return the stage."""
    stage = CompressionStage(**{"min_bytes": 0, **options})
    expected = gradients(compute_loss, wanted, nullcontext())
    for _ in range(2):  # nothing is left of the first run
        assert all(map(is_same, expected, gradients(compute_loss, wanted, stage)))
    return stage


def matrix(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIDE, SIDE, generator=generator).requires_grad_()


# Networks


def digits_resnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    net, images, labels = DigitsResNet().train(), torch.randn(4, 1, 8, 8), torch.randint(10, (4,))
    return net, lambda: F.cross_entropy(net(images), labels)


def unet() -> tuple[nn.Module, Callable[[], Tensor]]:
    net, x = make_network("unet")
    x = x[:2, :, :32, :32]
    return net, lambda: net(x).square().mean()


@pytest.mark.parametrize("make", [digits_resnet, byte_gpt, lstm, attention, unet])
def test_a_networks_gradients_are_equal_to_the_bit_and_it_keeps_no_more_than_plain(make: Callable) -> None:
    torch.manual_seed(0)
    net, compute_loss = make()
    plain, stage = live_bytes(compute_loss, nullcontext()), CompressionStage(net, min_bytes=0)
    for _ in range(2):  # nothing is left of the first run
        results, before = [], copy.deepcopy(net.state_dict())
        for context in (nullcontext(), stage):
            net.load_state_dict(before)
            found = gradients(compute_loss, list(net.parameters()), context)
            results.append(found + copy.deepcopy(list(net.buffers())))
        assert all(map(is_same, *results))
        assert live_bytes(compute_loss, CompressionStage(net)) <= plain


def test_a_gpt_full_of_dropout_keeps_what_is_worked_out_by_hand() -> None:
    net, compute_loss = byte_gpt()
    hidden, scores = 4 * 32 * 32 * NUMBER_BYTES, 4 * 4 * 32 * 32 * NUMBER_BYTES
    masks = 3 * hidden + scores  # after the embedding, attention and the MLP, and inside of attention
    of_a_mask = 2 * NUMBER_BYTES  # its two values
    with CompressionStage(net) as stage:
        compute_loss()
    plain = saved_bytes(net, compute_loss)
    assert stage.report.saved_bytes == plain == 677_156
    kept = plain - masks + masks // BITS + 4 * of_a_mask
    assert stage.report.kept_bytes == kept == 566_084
    assert live_bytes(compute_loss, nullcontext()) - live_bytes(compute_loss, CompressionStage(net)) == plain - kept


# Indices


def pooled(pool: Callable[..., tuple[Tensor, Tensor]], *shape: int) -> Callable[[Tensor], Tensor]:
    return lambda x: pool(x.reshape(*shape), 2, return_indices=True)[0]


WITH_INDICES = {
    "int64 max_pool1d": lambda x: F.max_pool1d(x, 2),
    "max_pool1d": lambda x: F.max_pool1d(x, 2, return_indices=True)[0],
    "int16 max_pool2d": pooled(F.max_pool2d, 1, 1, 32, 32),
    "int16 sort": lambda x: x.view(-1).sort(stable=True).values,
    "transposed sort": lambda x: x.t().sort(0).values,
    "gather by argmax": lambda x: x.gather(0, x.argmax(0, keepdim=True)),
    "index by argsort": lambda x: x[x[0].argsort()],
    "unpooled": lambda x: F.max_unpool2d(*F.max_pool2d(x[None], 2, return_indices=True), 2),
}


@pytest.mark.parametrize("name", WITH_INDICES)
def test_indices_in_a_narrow_integer_come_back(name: str) -> None:
    x, run = matrix(), WITH_INDICES[name]
    stage = assert_same_gradients(lambda: (run(x) * matrix(1).view(-1)[: run(x).numel()].view(run(x).shape)).sum(), [x])
    assert stage.report.kinds["indices"] >= 1


def test_indices_of_64_bits_become_8_or_16_bits() -> None:
    x = matrix()
    for run, width in ((lambda: x.sort(0).values, 1), (lambda: x.view(-1).sort().values, 2)):
        with CompressionStage() as stage:
            values = run()
        assert (stage.report.saved_bytes, stage.report.kept_bytes) == (8 * SIDE * SIDE, width * SIDE * SIDE)
        assert values.requires_grad


# ReLU


class Own(torch.autograd.Function):
    """Saves a ReLU that it makes itself, with or without a graph of its own, and perhaps returns it."""

    @staticmethod
    def forward(ctx, x, has_graph, is_output):
        with torch.set_grad_enabled(has_graph):
            y = F.relu(x.detach().requires_grad_() if has_graph else x)
        ctx.save_for_backward(y)
        return y if is_output else y.detach() * 1

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y, None, None


RELUS = {
    "alone": lambda x, w: F.relu(x) + 1,
    "in front of two": lambda x, w: F.relu(x) @ w + F.relu(x) * w,
    "transposed": lambda x, w: F.relu(x).t() @ w,
    "expanded": lambda x, w: F.relu(x).expand(3, -1, -1) * w,
    "of a transposed": lambda x, w: F.relu(x.t()) * w,
    "in place in front of a product": lambda x, w: F.relu_(x * 1) @ w,
    "in place on a view": lambda x, w: F.relu_((x * 1).view(-1)).view(SIDE, SIDE) @ w,
    "in place on a part": lambda x, w: (F.relu_((y := x * 1)[2:5]), y * w)[1],
    "in place on detached": lambda x, w: x * F.relu_((x * 1).detach()),
    "leaky in place": lambda x, w: F.leaky_relu_(x * 1) + 1,
    "nothing needs a gradient": lambda x, w: F.relu(x.detach()) * w,
    "in a function": lambda x, w: Own.apply(x, False, False),
    "in a function, with a graph": lambda x, w: Own.apply(x, True, False),
    "as the output of a function": lambda x, w: Own.apply(x, False, True),
    "checkpointed": lambda x, w: checkpoint(lambda x: F.relu(x) @ w, x * 1, use_reentrant=False) + F.relu(x),
    "rnn": lambda x, w: nn.RNN(SIDE, 4, nonlinearity="relu")(x)[0],
}


@pytest.mark.parametrize("name", RELUS)
def test_relu_everywhere(name: str) -> None:
    x, w = matrix(), matrix(1)
    with torch.no_grad():
        x.view(-1)[:6] = torch.tensor([torch.nan, -0.0, 0.0, torch.inf, -torch.inf, 1e-45])
    plain = live_bytes(lambda: RELUS[name](x, w).sum(), nullcontext())
    assert live_bytes(lambda: RELUS[name](x, w).sum(), CompressionStage(min_bytes=0)) <= plain
    assert_same_gradients(lambda: (RELUS[name](x, w) * 1.5).sum(), [x, w])


@pytest.mark.parametrize("in_place", [False, True])
def test_relu_alone_is_kept_as_bits_unless_it_is_in_place(in_place: bool) -> None:
    x = matrix()
    with CompressionStage() as stage:
        y = F.relu(x * 1, inplace=in_place) + 1
    assert stage.report.kept_bytes == SIDE * SIDE * NUMBER_BYTES // (1 if in_place else BITS)
    assert stage.report.saved_bytes == SIDE * SIDE * NUMBER_BYTES
    assert y.requires_grad


def test_relu_whose_values_are_saved_later_refers_to_those_and_keeps_them_as_plain_would() -> None:
    x, w = matrix(), matrix(1)
    stage = CompressionStage()
    with LiveBytes() as live:
        with stage:
            y = F.relu(x)
            product = y @ w
        assert live.count() == 2 * SIDE * SIDE * NUMBER_BYTES  # y and the product: no bits
        z = y.sum()
        del y, product  # the product's node is gone; what it kept is still there for ReLU
        (gradient,) = torch.autograd.grad(z, x)
    assert torch.equal(gradient, (x > 0).float())


def test_relu_of_another_stream_is_kept_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    x, streams = matrix(), [1]
    monkeypatch.setattr(compression_stage, "stream_id", lambda device: streams[-1])
    with CompressionStage() as stage:
        y = F.relu(x)
        streams.append(2)
        loss = (y + 1).sum() + x.exp().sum()
    assert stage.report.kept_bytes == stage.report.saved_bytes == 2 * SIDE * SIDE * NUMBER_BYTES
    assert torch.equal(torch.autograd.grad(loss, x)[0], (x > 0) + x.exp())


def test_relu_in_a_released_graph_is_not_taken_for_a_new_one() -> None:
    x, w = matrix(), matrix(1)
    for context in (nullcontext(), saved_tensors_hooks(lambda t: t, lambda t: t)):
        with CompressionStage(min_bytes=0):
            with context:
                y = F.relu(x)
            y.backward(torch.ones_like(y))
            product = (y @ w).sum()
        assert torch.equal(torch.autograd.grad(product, w)[0], y.detach().t() @ torch.ones(SIDE, SIDE))


def test_what_another_stage_hands_on_keeps_its_values() -> None:
    x, w = matrix(), matrix(1)

    def compute_loss() -> Tensor:
        y = F.relu(x @ w)
        return (y * 2 + 1).exp().sum() + F.silu(F.relu(y @ w) * 3).tanh().sum()

    for verify in ("first-step", "never"):
        expected = gradients(compute_loss, [x, w], nullcontext())
        recomputation = Recomputation(min_bytes=0, verify=verify)
        found = gradients(compute_loss, [x, w], both(CompressionStage(min_bytes=0), recomputation))
        assert recomputation.report.num_dropped
        assert all(map(is_same, expected, found))


@pytest.mark.parametrize("function", [F.relu, lambda x: F.leaky_relu_(x * 1)])
@pytest.mark.parametrize("is_inside", [False, True])
def test_double_backward(function: Callable[[Tensor], Tensor], is_inside: bool) -> None:
    results = []
    for context in (nullcontext(), CompressionStage(min_bytes=0)):
        x, w = matrix(), matrix(1)
        with context:
            loss = ((function(x) @ w).relu() ** 3).sum()
        with context if is_inside else nullcontext():
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            penalty = gradient.square().sum()
        penalty.backward()
        results.append([gradient, x.grad, w.grad])
    assert all(map(torch.equal, *results))


def test_empty_tensors_are_left_alone() -> None:
    x = torch.randn(0, 4, requires_grad=True)
    with CompressionStage(min_bytes=0, lossy="int8") as stage:
        loss = F.dropout(F.relu(x * 1), 0.5).sort(0).values.masked_fill(x > 0, 0.0).sin().sum()
    loss.backward()
    assert x.grad.shape == (0, 4)
    assert not stage.report.kinds


# Masks


MASKS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "native": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "alpha": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "by hand": lambda x: x * torch.empty_like(x).bernoulli_(0.5).mul_(2.0),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.25)),
    "transposed": lambda x: x * torch.empty(SIDE, SIDE).bernoulli_(0.5).t(),
}
OTHER_MASKS = {
    "feature": lambda x: F.dropout2d(x[None, :, :, None], 0.5),
    "all": lambda x: F.dropout(x, 1.0),
    "masked_fill": lambda x: x.masked_fill(x < 0, -torch.inf).softmax(-1),
    "by hand, to infinity": lambda x: x * torch.empty_like(x).bernoulli_(0.5).div_(0.0),
    "negative zeros": lambda x: 1 / (x * torch.empty_like(x).bernoulli_(0.5).mul_(-1.0)),
    "expanded": lambda x: x * torch.empty(SIDE, 1).bernoulli_(0.5).expand(SIDE, SIDE),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.rand(SIDE, SIDE) > 0.3),
}


@pytest.mark.parametrize("name", MASKS | OTHER_MASKS)
def test_masks_come_back_to_the_bit(name: str) -> None:
    x, run = matrix(), (MASKS | OTHER_MASKS)[name]
    assert_same_gradients(lambda: run(x).nan_to_num().sum(), [x])
    with CompressionStage() as stage:
        loss = run(x)
    assert name in OTHER_MASKS or stage.report.kept_bytes <= SIDE * SIDE // 8 + 2 * NUMBER_BYTES
    assert loss.requires_grad


SAVED = {  # what is made, what saves it, and what is written to it in between
    "indices": (lambda x: x.sort(0).indices, lambda x, y: x.gather(0, y), lambda y: y.flip(0)),
    "bool": (lambda x: x > 0, lambda x, y: x.masked_fill(y, 0.0), lambda y: y.flip(0)),
    "mask": (lambda x: torch.bernoulli(x.detach() * 0 + 0.5), lambda x, y: x * y, lambda y: y.cumsum(0) / 7),
    "lossy": (lambda x: (x * 0).exp(), lambda x, y: x * y, lambda y: torch.full_like(y, 2.0)),
}
WITHOUT_A_VERSION = {
    "numpy": lambda y, other: y.numpy().__setitem__(slice(None), other.numpy()),
    "data": lambda y, other: y.data.copy_(other),
    "foreach": lambda y, other: torch._foreach_copy_([y.data], [other]),
}


@pytest.mark.parametrize(
    ("write", "can_be_read"), [*((write, True) for write in WITHOUT_A_VERSION), ("data", False), ("foreach", False)]
)
@pytest.mark.parametrize("kind", SAVED)
def test_a_second_save_after_a_quiet_write_is_what_it_is_then(
    kind: str, write: str, can_be_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_be_read:  # on a device a look at the values is too dear
        monkeypatch.setattr(compression_stage, "can_be_read", lambda tensor: False)
    make, use, change = SAVED[kind]
    x, results = matrix(), []
    for context in (nullcontext(), CompressionStage(min_bytes=0, lossy="int8" if kind == "lossy" else None)):
        torch.manual_seed(0)
        with context:
            y = make(x)
            first = use(x, y)
            WITHOUT_A_VERSION[write](y.detach(), change(y.detach()))
            second = use(x, y).sum()
        results.append(torch.autograd.grad(second, x)[0])
        del first
    torch.testing.assert_close(*results, rtol=0.02 if kind == "lossy" else 0, atol=0)


def test_a_mask_saved_several_times_is_kept_once() -> None:
    x, w = matrix(), matrix(1)
    with CompressionStage() as stage:
        mask = torch.rand(SIDE, SIDE) > 0.5
        outputs = [x.masked_fill(mask, 0.0), w.masked_fill(mask.t(), 1.0), x.view(-1).masked_fill(mask.view(-1), 0.0)]
    assert stage.report.kinds["mask"] == 1
    assert stage.report.kept_bytes == SIDE * SIDE // 8
    del mask
    expected = torch.autograd.grad(sum(output.sum() for output in outputs), [x, w])
    assert [gradient.isfinite().all() for gradient in expected]


# Graphs


def test_a_graph_that_is_retained_gives_the_same_twice() -> None:
    x, w = matrix(), matrix(1)
    with CompressionStage(min_bytes=0):
        loss = (F.dropout(F.relu(x), 0.5) @ w).sort(0).values.square().sum()
    first = torch.autograd.grad(loss, [x, w], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, [x, w])))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_under_bf16_autocast_gradients_are_equal_to_the_bit() -> None:
    for make in (digits_resnet, byte_gpt):
        net, compute = make()

        def compute_loss(compute: Callable[[], Tensor] = compute) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return compute().float()

        assert_same_gradients(compute_loss, list(net.parameters()), module=net)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers(use_reentrant: bool) -> None:
    net = nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Dropout(), nn.Linear(SIDE, SIDE), nn.ReLU())
    results = []
    for context in (nullcontext(), CompressionStage(net, min_bytes=0)):
        torch.manual_seed(0)
        net.zero_grad()
        x = matrix()
        with context:
            y = net(checkpoint(net, net(x), use_reentrant=use_reentrant)).sum()
            y.backward()
        results.append([x.grad, *(parameter.grad.clone() for parameter in net.parameters())])
    assert all(map(torch.equal, *results))


def test_a_compiled_part_and_an_eager_part() -> None:
    torch.compiler.reset()
    net = nn.Sequential(nn.Linear(SIDE, SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE))
    compiled, eager, x = torch.compile(net, backend="aot_eager"), nn.Sequential(nn.ReLU(), net[2]), matrix()
    with CompressionStage(net, min_bytes=0):
        loss = eager(compiled(x)).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(eager(net(x)).sum(), x)[0])
    torch.compiler.reset()


def test_hooks_of_the_users_own_inside_and_outside() -> None:
    x, w = matrix(), matrix(1)
    seen = []

    def compute_loss() -> Tensor:
        y = F.relu(x)
        with saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t):
            z = F.relu(y) @ w
        return (F.relu(z) + 1).sum()

    assert_same_gradients(compute_loss, [x, w])
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        assert_same_gradients(compute_loss, [x, w])
    assert seen


def test_fake_tensors_keep_as_many_bytes_as_real_ones() -> None:
    reports = []
    for context in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with context:
            x, w = torch.randn(SIDE, SIDE, requires_grad=True), torch.randn(SIDE, SIDE, requires_grad=True)
            for options in ({}, {"lossy": "int8"}, {"lossy": "fp8"}, {"lossy": "bf16"}):
                with CompressionStage(**options) as stage:
                    y = F.dropout(F.relu(x) + w, 0.5).sort(0).values @ w
                    loss = F.relu(F.layer_norm(y, (SIDE,))).masked_fill(y > 0, 1.0).sum()
                loss.backward()
                assert x.grad.shape == x.shape
                reports.append(stage.report)
    half = len(reports) // 2
    assert reports[:half] == reports[half:]
    assert reports[0].kept_bytes < reports[0].saved_bytes


def fail(x: Tensor) -> None:
    y = F.relu(x) @ F.dropout(x, 0.5)
    raise ZeroDivisionError(y.sort().values.shape)


def test_nothing_is_alive_after_a_step_or_an_error() -> None:
    net, compute_loss = byte_gpt()
    x = matrix()
    for options, is_exact in (({}, False), ({"lossy": "int8"}, False), ({"lossy": "int8"}, True)):
        stage = CompressionStage(net, **options)
        gc.collect()
        gc.disable()
        try:
            with LiveBytes() as live:
                for _ in range(2):
                    stage.keeps_exact = is_exact
                    with stage:
                        compute_loss()
                    with stage, pytest.raises(ZeroDivisionError):
                        fail(x)
                alive = [size for storage, size in live.storages.values() if storage() is not None]
        finally:
            gc.enable()
        assert sum(alive) <= 64  # the empty tensors of version counters
        assert not stage._memories
        assert not stage._notes._notes


def test_saved_tensors_are_freed_while_the_stage_stays_entered() -> None:
    x = matrix()
    with LiveBytes() as live, CompressionStage():
        for _ in range(3):
            F.dropout(F.relu(x), 0.5).sort(0).values.sum().backward()
            x.grad = None
        assert live.count() <= 64


# Loss


def lossy_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()) for _ in range(3)])


@pytest.mark.parametrize(("lossy", "width"), [("bf16", 2), ("fp8", 1), ("int8", 1)])
def test_all_layers_chosen_keep_codes_and_scales_alone(lossy: str, width: int) -> None:
    net, x = lossy_net(), matrix()
    one = SIDE * SIDE
    scales = 0 if lossy == "bf16" else one // 128 * NUMBER_BYTES
    stage = CompressionStage(net, lossy=lossy, layers=select_layers(net).modules())
    with stage:
        loss = net(x * 1).sum()
    assert stage.report.saved_bytes == 4 * one * NUMBER_BYTES
    assert stage.report.kept_bytes == 4 * (width * one + scales)
    exact = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    stored = torch.autograd.grad(loss, list(net.parameters()))
    for a, b in zip(exact, stored, strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.995
    live = live_bytes(lambda: net(x * 1).sum(), nullcontext()) - live_bytes(lambda: net(x * 1).sum(), stage)
    assert live == 4 * (one * NUMBER_BYTES - width * one - scales)


EXACT = {
    "data": lambda x, w: (x.detach() * w).sum(),  # which is not saved for itself: the data has no gradient
    "integers and masks": lambda x, w: x.masked_fill(x > 0, 0.0).sum(),
    "statistics": lambda x, w: (x + x.mean(1, keepdim=True).rsqrt()).sum(),
    "small": lambda x, w: (x[0] * 1).exp().sum(),
    "one column": lambda x, w: (x.view(-1, 1) * 1).exp().sum(),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_must_be_exact_is_exact(name: str) -> None:
    x, w = (matrix(seed).detach().abs().requires_grad_() for seed in range(2))
    with CompressionStage(lossy="int8", min_bytes=1000) as stage:
        EXACT[name](x, w).backward()
    assert not stage.report.kinds["int8"]


def test_weights_cast_by_autocast_are_exact() -> None:
    net, x = nn.Linear(SIDE, SIDE, bias=False), matrix()
    with CompressionStage(net, lossy="fp8") as stage, torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    assert stage.report.kinds == {"fp8": 1}  # the cast input, not the cast weight
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
    gradients = [torch.autograd.grad(z.float().sum(), x)[0] for z in (y, expected)]
    assert torch.equal(*gradients)


def test_a_tensor_saved_exactly_elsewhere_is_kept_once() -> None:
    x, net = matrix(), nn.Linear(SIDE, SIDE)
    one = SIDE * SIDE * NUMBER_BYTES
    for exact_first in (False, True):
        with CompressionStage(net, lossy="int8", layers=[net]) as stage:
            y = x + 1
            loss = y.square().sum() + net(y).sum() if exact_first else net(y).sum() + y.square().sum()
        assert stage.report.kept_bytes == one
        stored = torch.autograd.grad(loss, [x, net.weight])
        exact = torch.autograd.grad((x + 1).square().sum() + net(x + 1).sum(), [x, net.weight])
        assert all(map(torch.equal, stored, exact))


class Nested(nn.Module):
    """Calls a layer inside of itself, twice, and may fail."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, error: BaseException | None = None) -> Tensor:
        if error is not None:
            raise error
        return self.inner(self.inner(x)).exp()


@pytest.mark.parametrize("error", [ValueError("theirs"), KeyboardInterrupt()])
def test_layers_nested_reused_and_failing_are_left_when_they_are_left(error: BaseException) -> None:
    layer, x = Nested(nn.Tanh()), matrix()
    stage = CompressionStage(layer, lossy="int8", layers=[layer, layer.inner, layer])
    before = describe_module(layer)
    with stage:
        layer(x)
        assert stage.report.kinds["int8"] == 3
        assert not stage._layers.is_inside
        with pytest.raises(type(error)):
            layer(x, error)
        layer(x)
        assert stage._layers.is_inside == isinstance(error, KeyboardInterrupt)  # until the end of the run
    with stage:
        assert not stage._layers.is_inside
        assert describe_module(layer) != before
    assert describe_module(layer) == before


# The chain


def test_what_it_makes_and_what_it_leaves_is_handed_on() -> None:
    x, w = matrix(), matrix(1)

    def compute_loss() -> Tensor:
        y = F.relu(x) @ w + F.dropout(F.relu(w), 0.5) + F.relu(x)
        return y.sort(0).values.masked_fill(x > 0, 0.0).square().sum()

    outer, compression = ActivationOffloading(min_offload_bytes=1, window_bytes=0), CompressionStage(min_bytes=0)
    expected = gradients(compute_loss, [x, w], nullcontext())
    assert all(map(is_same, expected, gradients(compute_loss, [x, w], both(outer, compression))))
    assert compression.report.kept_bytes == 0
    assert compression.report.kinds["indices"] == compression.report.kinds["mask"] == 1


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.t(), lambda y: y.view(-1, 8), lambda y: y[:4]])
def test_signs_given_up_for_a_tensor_that_was_taken_come_from_there(view: Callable[[Tensor], Tensor]) -> None:
    x, w = matrix(), matrix(1)

    def compute_loss() -> Tensor:
        y = view(F.relu(x))
        return (y * w.view(-1)[: y.shape[-1]]).exp().sum()

    expected = gradients(compute_loss, [x, w], nullcontext())
    found = gradients(
        compute_loss, [x, w], both(ActivationOffloading(min_offload_bytes=1), CompressionStage(min_bytes=0))
    )
    assert all(map(is_same, expected, found))
