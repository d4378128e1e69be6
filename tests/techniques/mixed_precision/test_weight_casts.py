"""No 16-bit casts of weights are kept; values and gradients are those of autocast without its cache, to the bit."""

import copy
import pickle
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise

import pytest
import torch
from support.helpers import describe_module
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading
from lightning_vram.techniques.in_place_fusion.observed_links import Link
from lightning_vram.techniques.in_place_fusion.policy import fold_frozen_batch_norm
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation
from lightning_vram.techniques.mixed_precision.weight_casts import WeightCasts, find_autocast_weights

bf16 = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)


class Attention(nn.Module):
    """Attention of a sequence to itself, or to another of other widths."""

    def __init__(self, *, is_cross: bool, **options: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.is_cross, self.width = is_cross, options.get("kdim", 8)

    def forward(self, x: Tensor) -> Tensor:
        other = torch.tanh(x.repeat(1, 2, 2)[..., : self.width])
        output: Tensor = self.attention(x, other, other)[0] if self.is_cross else self.attention(x, x, x)[0]
        return output


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


class Repeated(nn.Module):
    """One module several times."""

    def __init__(self, module: nn.Module, num_uses: int = 3) -> None:
        super().__init__()
        self.module, self.num_uses = module, num_uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_uses):
            x = torch.tanh(self.module(x))
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 4), (3, 8)),
    "conv 2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 8, 8)),
    "conv 2d, channels last": (lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last), (2, 4, 8, 8)),
    "conv 3d": (lambda: nn.Conv3d(2, 4, 3, groups=2), (2, 2, 5, 5, 5)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, output_padding=1, stride=2), (2, 4, 5, 5)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, 3), (2, 2, 4, 4, 4)),
    "attention": (lambda: Attention(is_cross=False), (2, 3, 8)),
    "attention to another": (lambda: Attention(is_cross=True), (2, 3, 8)),
    "attention of other widths": (lambda: Attention(is_cross=True, kdim=10, vdim=10), (2, 3, 8)),
    "of GPT-2": (lambda: pytest.importorskip("transformers.pytorch_utils").Conv1D(8, 8), (2, 3, 8)),  # transposed
    "tied": (Tied, (3, 8)),
    "frozen within": (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)), (3, 8)),
    "repeated": (lambda: Repeated(nn.Linear(8, 8)), (3, 8)),
    "repeated attention": (lambda: Repeated(Attention(is_cross=True)), (2, 3, 8)),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build(), torch.randn(shape, requires_grad=True)


def gradients(
    model: nn.Module,
    x: Tensor,
    context: Callable[[], AbstractContextManager[object]] = bf16,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Tensor]:
    """Loss, and the gradients of the input and of every parameter that has one."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    with around():
        with context():
            output = model(x)
        loss = output.float().square().sum()
        del output
    loss.backward()
    assert x.grad is not None
    return [loss, x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def assert_same(ones: list[Tensor], others: list[Tensor]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    plain, x = make(name)
    ours = copy.deepcopy(plain)
    casts = WeightCasts(ours, "cpu")
    autocast = partial(torch.autocast, "cpu", dtype, cache_enabled=False)
    for _ in range(2):
        assert_same(gradients(plain, x, autocast), gradients(ours, x, autocast))
    assert_same(gradients(plain, x, nullcontext), gradients(ours, x, nullcontext))
    casts.remove()


def linears(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(i, o) for i, o in pairwise(widths)))


def live_after_forward(
    model: nn.Module, x: Tensor, context: Callable[[], AbstractContextManager[object]] = bf16
) -> int:
    """Bytes beyond parameters and input: what the graph keeps, and the output in 16 bit."""
    with track_memory(model, inputs=x) as tracker:
        with context():
            output = model(x)
        live = tracker.timeline.live_bytes
    del output
    return live - x.nbytes - sum(parameter.nbytes for parameter in model.parameters())


WIDTHS = (64, 96, 128, 160, 192, 224, 256, 128, 64)


def test_recast_keeps_no_cast() -> None:
    """Each layer keeps its input in 16 bit (the output of the one before it); plain: all weights but the first, too."""
    model, x = linears(*WIDTHS), torch.randn(2, WIDTHS[0])
    activations = sum(2 * 2 * width for width in WIDTHS)
    weights = sum(2 * i * o for i, o in pairwise(WIDTHS[1:]))
    assert live_after_forward(model, x) == activations + weights
    WeightCasts(model, "cpu")
    assert live_after_forward(model, x) == activations


def test_fake_tensors_tell_the_same_bytes() -> None:
    def measure() -> int:
        model = Repeated(linears(64, 64, 64))
        WeightCasts(model, "cpu")
        return live_after_forward(model, torch.randn(2, 64))

    expected = measure()
    with FakeTensorMode():
        assert measure() == expected


@pytest.mark.parametrize("name", ["linear", "repeated", "attention", "conv 2d", "frozen within"])
def test_a_second_and_a_double_backward_have_the_same_bits(name: str) -> None:
    plain, x = make(name)
    ours = copy.deepcopy(plain)
    WeightCasts(ours, "cpu")
    results = []
    for model in (plain, ours):
        with bf16():
            loss = model(x).float().square().sum()
        inputs = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        slopes = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = sum(slope.square().sum() for slope in slopes)
        results.append([*first, *slopes, *torch.autograd.grad(penalty, inputs)])
    assert_same(*results)


WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: "
    "[torch.FloatTensor [8, 8]] is at version {now}; expected version {before} instead."
)


def test_recast_refuses_a_weight_that_was_written() -> None:
    model, x = linears(8, 8), torch.ones(2, 8, requires_grad=True)
    WeightCasts(model, "cpu")
    with bf16():
        loss = model(x).float().sum()
    before = model[0].weight._version
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=f"^{re.escape(WRITTEN.format(now=before + 1, before=before))}$"):
        loss.backward()


def test_recast_refuses_a_weight_that_a_fused_optimizer_wrote() -> None:
    model, other, x = linears(8, 8), nn.Linear(8, 8), torch.ones(2, 8, requires_grad=True)
    casts = WeightCasts(model, "cpu")
    with bf16():
        loss = model(x).float().sum()
    loss.backward(retain_graph=True)
    before = model[0].weight._version, other.weight._version
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()
    assert model[0].weight._version == before[0]  # or else after_step is not needed any more
    casts.after_step(iter((*model.parameters(), *other.parameters())))
    assert (model[0].weight._version, other.weight._version) == (before[0] + 1, before[1])
    with pytest.raises(RuntimeError, match=r"^one of the variables needed "):
        loss.backward()


class Net(nn.Module):
    """Something for every technique: norms, activations, dropout, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        for _ in range(2):
            hidden = hidden + self.body(hidden)
        return self.head(hidden)


def train(model: nn.Module, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        with around(), bf16():
            loss = model(torch.randn(4, 3, 8, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(value, "full_tensor", lambda value=value: value)() for value in model.state_dict().values()]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


STAGES: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
    "offload": lambda model: ActivationOffloading(model, min_offload_bytes=0),
    "compression": CompressionStage,
    "recomputation": lambda model: Recomputation(model, min_bytes=0, verify="always"),
    "save_on_cpu": lambda _: save_on_cpu(),
}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_go_on_working(stage: str) -> None:
    expected, model = train(net()), net()
    WeightCasts(model, "cpu")
    assert_same(expected, train(model, partial(STAGES[stage], model)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_go_on_working(reentrant: bool) -> None:
    expected, model = train(net()), net()
    WeightCasts(model, "cpu")
    plain = model.body.forward
    model.body.forward = lambda x: checkpoint(plain, x, use_reentrant=reentrant)
    assert_same(expected, train(model))


@pytest.mark.parametrize("check", ["outputs", "operators"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_packs_checkpoints_go_on_working(check: str, is_first: bool) -> None:
    expected, model = train(net()), net()
    if is_first:
        casts = WeightCasts(model, "cpu")
    handle = apply_activation_checkpointing(model, layers=["body.*", "head"], determinism_check=check)
    if not is_first:
        casts = WeightCasts(model, "cpu")
    assert_same(expected, train(model))
    casts.remove()
    handle.remove()
    assert {type(module) for module in model.modules()} == {type(module) for module in net().modules()}


def test_folded_batch_norms_go_on_working() -> None:
    results = []
    for ours in (False, True):
        model = net()
        model.norm.eval()
        fold_frozen_batch_norm([Link(model.conv, model.norm)])
        if ours:
            WeightCasts(model, "cpu")
        results.append(train(model))
    assert_same(*results)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_goes_on_working(mesh: DeviceMesh, is_first: bool, reshard: bool) -> None:
    """It frees the weights after the forward, and gathers them again for the backward, into the same parameters."""
    expected, model = train(net()), net()
    if is_first:
        casts = WeightCasts(model, "cpu")
    for part in (model.body, model.head, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    if not is_first:
        casts = WeightCasts(model, "cpu")
    assert_same(expected, train(model))
    casts.after_step(model.parameters())
    casts.remove()


def test_copies_and_pickles_are_plain() -> None:
    model = net()
    expected = describe_module(model)
    casts = WeightCasts(model, "cpu")
    with bf16():
        model(torch.randn(2, 3, 8, 8))
    assert describe_module(copy.deepcopy(model)) == expected
    assert describe_module(pickle.loads(pickle.dumps(model))) == expected
    assert describe_module(model) != expected
    casts.remove()
    casts.remove()
    assert describe_module(model) == expected


def test_backwards_of_earlier_forwards_work_after_removal() -> None:
    plain, ours = linears(8, 8), linears(8, 8)
    x = torch.ones(2, 8, requires_grad=True)
    expected = gradients(plain, x)
    casts = WeightCasts(ours, "cpu")
    assert_same(expected, gradients(ours, x, around=lambda: _removed_afterwards(casts)))


@contextmanager
def _removed_afterwards(casts: WeightCasts) -> Iterator[None]:
    yield
    casts.remove()


def test_nested_autocast_of_another_dtype() -> None:
    class Mixed(Tied):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                x = self.second(self.first(x.float()))
            with torch.autocast("cpu", enabled=False):
                x = self.second(x.float())
            return self.first(x)

    torch.manual_seed(0)
    plain = Mixed()
    ours = copy.deepcopy(plain)
    WeightCasts(ours, "cpu")
    x = torch.randn(3, 8)
    assert_same(gradients(plain, x), gradients(ours, x))


class OwnConvolution(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight / weight.std(), bias)


class Plain(nn.Linear):
    """A subclass that changes nothing in the forward."""


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.sum()


def patched(module: nn.Module) -> nn.Module:
    module.forward = lambda x: x
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "own forward": lambda: OwnForward(8, 8),
    "own convolution": lambda: OwnConvolution(4, 4, 1),
    "64 bit": lambda: nn.Linear(8, 8).double(),
    "16 bit": lambda: nn.Linear(8, 8).bfloat16(),
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "pruned": lambda: prune.identity(nn.Linear(8, 8), "weight"),
    "lazy": lambda: nn.LazyLinear(8),
    "traced": lambda: torch.jit.trace(nn.Linear(8, 8), torch.ones(1, 8)),
    "patched": lambda: patched(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_other_modules_are_left_alone(name: str) -> None:
    module = nn.Sequential(OTHERS[name](), Plain(8, 8))
    before = [type(part) for part in module]
    WeightCasts(module, "cpu")
    assert type(module[0]) is before[0]
    assert type(module[1]) is not before[1]


class OwnParameter(nn.Parameter):
    def to(self, *args: object, **kwargs: object) -> Tensor:
        raise AssertionError("nobody knows what this does")


def test_weights_that_are_changed_afterwards_are_left_alone() -> None:
    def change(model: nn.Sequential) -> None:
        parametrizations.weight_norm(model[0])
        prune.l1_unstructured(model[1], "weight", 0.5)
        model[2].bfloat16()
        model[3].forward = lambda x: x
        vars(model[4])["weight"] = torch.ones(8, 8)
        model[5].weight = OwnParameter(model[5].weight.detach())

    plain, ours = linears(*[8] * 7), linears(*[8] * 7)
    WeightCasts(ours, "cpu")
    change(plain)
    change(ours)
    x = torch.randn(2, 8)
    assert_same(gradients(plain, x), gradients(ours, x))


def test_skip_leaves_modules_and_what_is_inside_alone() -> None:
    model = nn.Sequential(linears(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2))
    before = [type(module) for module in model.modules()]
    WeightCasts(model, "cpu", skip=[model[0], model[1], model[2].out_proj])
    changed = [kind is not type(module) for kind, module in zip(before, model.modules(), strict=True)]
    assert changed == [False, False, False, False, True, False]


def test_compiled_code_is_one_plain_graph() -> None:
    def operators(model: nn.Module) -> list[str]:
        graphs: list[torch.fx.GraphModule] = []
        with bf16():
            torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(x)
        (graph,) = graphs
        return [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]

    plain, ours, x = linears(8, 8, 8), linears(8, 8, 8), torch.ones(2, 8, requires_grad=True)
    WeightCasts(ours, "cpu")
    assert operators(ours) == operators(plain)


def test_transforms_run_plain() -> None:
    plain, ours, x = linears(8, 8, 8), linears(8, 8, 8), torch.randn(4, 8)
    WeightCasts(ours, "cpu")

    def slopes(model: nn.Module) -> list[Tensor]:
        def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
            with bf16():
                return functional_call(model, parameters, (sample,)).float().square().sum()

        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        return [*each.values(), *torch.func.grad(loss)(parameters, x).values()]

    assert_same(slopes(plain), slopes(ours))
    replaced = {"0.weight": torch.randn(8, 8, requires_grad=True)}
    with bf16():
        inputs = [torch.func.grad(lambda x, model=model: model(x).float().square().sum())(x) for model in (plain, ours)]
        assert torch.equal(*inputs)
        assert torch.equal(functional_call(plain, replaced, (x,)), functional_call(ours, replaced, (x,)))


def test_recast_steps_aside_where_saved_tensor_hooks_are_forbidden() -> None:
    plain, ours, x = linears(8, 8), linears(8, 8), torch.ones(2, 8)
    WeightCasts(ours, "cpu")
    expected = gradients(plain, x)
    assert_same(expected, gradients(ours, x, around=lambda: disable_saved_tensors_hooks("not here")))


def test_a_model_is_not_changed_twice() -> None:
    model = linears(8, 8)
    casts = WeightCasts(model, "cpu")
    message = "model is in another running fit, or WeightCasts, with some of its modules: end or remove that first."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        WeightCasts(nn.Sequential(nn.Linear(8, 8), model), "cpu")
    casts.remove()
    WeightCasts(model, "cpu")


class Several(nn.Module):
    """A body that runs in a selective checkpoint, and again in or behind it."""

    def __init__(self, order: str, saved: Collection[object]) -> None:
        super().__init__()
        self.first, self.order, self.saved = nn.Linear(8, 8), order, saved
        self.body = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8))

    def checkpointed(self, x: Tensor) -> Tensor:
        if not self.saved:
            return self.body(x)  # which the package checkpoints
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        return checkpoint(self.body, x, use_reentrant=False, context_fn=contexts)

    def policy(self, _: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in self.saved else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).float()
        if self.order == "twice":
            return self.checkpointed(x) + self.checkpointed(2 * x)
        return self.body(self.checkpointed(x).float())


CASTS, PRODUCTS = torch.ops.aten._to_copy.default, torch.ops.aten.addmm.default


@pytest.mark.parametrize("order", ["twice", "plain after"])
@pytest.mark.parametrize(
    "saved",
    [{CASTS}, {CASTS, PRODUCTS}, ["aten._to_copy"], "matmuls"],
    ids=["casts", "casts and products", "our casts", "our products"],
)
def test_selective_checkpoints_go_on_working(order: str, saved: set[object] | str | list[str]) -> None:
    is_torchs = isinstance(saved, set)
    torch.manual_seed(0)
    model, x = Several(order, saved if is_torchs else ()), torch.randn(8, 8)
    expected = gradients(model, x)
    if not is_torchs:
        apply_activation_checkpointing(model, layers=["body"], save=SavePolicy(saved))
    WeightCasts(model, "cpu")
    assert_same(expected, gradients(model, x))


# --- weights that are read in 16 bit alone: those of stock layers that nobody else owns ---


def make_net() -> nn.ModuleDict:
    layers = {
        "embed": nn.Embedding(7, 4),
        "linear": nn.Linear(4, 4),
        "conv": nn.Conv1d(4, 4, 3),
        "norm": nn.LayerNorm(4),
        "attention": nn.MultiheadAttention(4, 2),
        "gru": nn.GRU(4, 4),
        "own forward": OwnForward(4, 4),
        "wide": nn.Linear(4, 4).double(),
        "low": nn.Linear(4, 4).half(),
        "own": nn.ParameterList([torch.ones(4)]),
        "plain": nn.Linear(4, 4, bias=False),
    }
    return nn.ModuleDict(layers)


def names(net: nn.Module, found: set[nn.Parameter]) -> set[str]:
    return {name for name, parameter in net.named_parameters() if parameter in found}


def test_weights_and_biases_of_layers_that_autocast_casts_are_found():
    net = make_net()
    assert names(net, find_autocast_weights(net)) == {
        "linear.weight",
        "linear.bias",
        "conv.weight",
        "conv.bias",
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
        "plain.weight",
    }


def test_a_weight_with_two_owners_is_not_among_them_and_its_layers_bias_is():
    net = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7)})
    net["head"].weight = net["embed"].weight
    assert names(net, find_autocast_weights(net)) == {"head.bias"}


def test_modules_that_compute_in_float32_are_left_out():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.MultiheadAttention(4, 2))
    assert names(net, find_autocast_weights(net, [net[0], net[1][0]])) == {
        "2.in_proj_weight",
        "2.in_proj_bias",
        "2.out_proj.weight",
        "2.out_proj.bias",
    }
    assert not find_autocast_weights(net[2], [net[2], net[2].out_proj])
    assert find_autocast_weights(net[0]) == {net[0].weight, net[0].bias}  # the module itself may be the layer
