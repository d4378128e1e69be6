"""Selective checkpointing: what is kept, what runs again, and that nothing else changes."""

import gc
import weakref

import numpy as np
import pytest
import torch
from support.helpers import TinyCNN, TinyGPT
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram import track_memory
from lightning_vram.core.recomputed_saves import RecomputationError
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy

aten = torch.ops.aten
FLOAT = 4


class Counter(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.dropout(self.down(F.gelu(self.up(self.norm(hidden)))), 0.3, self.training)


class Net(nn.Module):
    def __init__(self, make_block=Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def gradients(model: nn.Module, hidden: Tensor, *, num_backwards: int = 1) -> list[Tensor]:
    torch.manual_seed(1)
    loss = model(hidden).square().sum()
    for number in range(num_backwards):
        loss.backward(retain_graph=number + 1 < num_backwards)
    found = [hidden.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]
    found = [gradient.clone() for gradient in found if gradient is not None]
    hidden.grad = None
    model.zero_grad()
    return found


def assert_same_as_plain(make_model, hidden: Tensor, save, num_steps: int = 3, **how) -> None:
    results = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = make_model()
        if not is_plain:
            apply_activation_checkpointing(model, layers="blocks.*", save=SavePolicy(save))
        results.append([gradients(model, hidden, **how) for _ in range(num_steps)])
    for plain, saving in zip(*results, strict=True):
        assert len(plain) == len(saving)
        assert all(map(torch.equal, plain, saving))


@pytest.mark.parametrize("save", ["matmuls", "attention", ["aten.addmm"], ["aten.gelu.default", "aten.native_dropout"]])
def test_gradients_are_those_of_the_plain_model(save):
    assert_same_as_plain(Net, torch.randn(4, 8, requires_grad=True), save)


def test_matrix_products_run_once():
    model = Net(num_blocks=1)
    apply_activation_checkpointing(model, layers="blocks.*", save=SavePolicy("matmuls"))
    with Counter() as counter:
        loss = model(torch.randn(4, 8)).sum()
    assert counter.names.count("aten.addmm.default") == 2
    with Counter() as counter:
        loss.backward()
    assert "aten.addmm.default" not in counter.names
    assert "aten.gelu.default" in counter.names


def test_keeps_what_was_asked_for_and_nothing_that_the_second_run_does_not_reach():
    rows, width = 16, 8
    hidden = torch.randn(rows, width)
    model = Net(lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)))
    apply_activation_checkpointing(model, layers="blocks.*", save=SavePolicy("matmuls"), determinism_check="none")
    with track_memory(model, inputs=hidden) as tracker:
        loss = model(hidden).square().sum()
        loss.backward()
    # the inputs of blocks 1 and 2 and the squared output; of each block the wide product, not the last one
    expected = (3 * rows * width + 3 * rows * 4 * width) * FLOAT
    assert tracker.timeline.saved_for_backward_bytes - expected in range(16)


def test_every_nth_result_only():
    model = Net(num_blocks=1)
    policy = SavePolicy(["aten.addmm"], every_n=2)
    apply_activation_checkpointing(model, layers="blocks.*", save=policy, determinism_check="none")
    loss = model(torch.randn(4, 8)).sum()
    with Counter() as counter:
        loss.backward()
    assert counter.names.count("aten.addmm.default") == 1


class AttentionBlock(nn.Module):
    """Attention with dropout draws random numbers, and so does what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).chunk(3, -1)
        return hidden + F.dropout(self.out(random_mixing(query, key, value)), 0.5)


@torch.library.custom_op("lightning_vram_tests::random_mixing", mutates_args=())
def random_mixing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return query * key * (torch.rand_like(value) > 0.5) + value


@random_mixing.register_fake
def _(query, key, value):
    return torch.empty_like(query)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx, grad):
    query, output = ctx.saved_tensors  # at once: checkpoints give each tensor once
    return grad * output, grad * query, grad


random_mixing.register_autograd(_backward, setup_context=_save)


def test_a_kept_operator_that_draws_random_numbers_leaves_the_generator_where_it_was():
    hidden = torch.randn(4, 8, requires_grad=True)
    assert_same_as_plain(lambda: Net(AttentionBlock), hidden, ["lightning_vram_tests.random_mixing"])
    model = Net(AttentionBlock, 1)
    apply_activation_checkpointing(
        model, layers="blocks.*", save=SavePolicy(["lightning_vram_tests.random_mixing"]), determinism_check="none"
    )
    loss = model(hidden).sum()
    with Counter() as counter:
        loss.backward()
    assert "lightning_vram_tests.random_mixing.default" not in counter.names  # else nothing was shown


class InplaceBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.relu_(self.up(hidden)))


class OverwritingNet(Net):
    """Overwrites what a block returns, which nothing of the block's backward needs."""

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden).mul_(2)
        return hidden


class NestedBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.utils.checkpoint.checkpoint(lambda x: F.gelu(self.up(x)), hidden, use_reentrant=False)
        return self.down(inner) @ hidden.mT @ hidden


class PenaltyBlock(Block):
    """A backward inside of the layer."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            probe = hidden.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.up(probe).square().sum(), probe, create_graph=True)
        return self.down(F.gelu(self.up(hidden))) + slope


MODELS = {
    "layers that overwrite a result": lambda: Net(InplaceBlock),
    "a net that overwrites what a layer returns": lambda: OverwritingNet(InplaceBlock),
    "nested checkpoints": lambda: Net(NestedBlock),
    "a backward inside": lambda: Net(PenaltyBlock),
    "recurrent layers": lambda: Net(lambda: FirstOf(nn.LSTM(8, 8))),
    "writes through views that count on their own": lambda: Net(UnsafeViewBlock),
    "writes through .data": lambda: Net(DataBlock),
    "a generator of its own": lambda: Net(GeneratorBlock),
    "attention": lambda: Net(lambda: nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, batch_first=True)),
}


class UnsafeViewBlock(Block):
    """A batched product and a linear layer without bias are views that count versions on their own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        scores = hidden @ hidden.mT
        scores *= 0.5
        scores += 1
        return torch.softmax(scores, -1) @ F.silu(self.wide(hidden), inplace=True)


class DataBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        wide = self.up(hidden)
        wide.data.mul_(0.5)
        return self.down(wide.sin())


class GeneratorBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, hidden: Tensor) -> Tensor:
        noise = torch.rand(hidden.shape, generator=self.generator)
        return self.down(F.gelu(self.up(hidden * noise))) * torch.rand(8, generator=self.generator)


class FirstOf(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden)[0]


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_result_is_that_of_the_plain_model_with(make_model):
    assert_same_as_plain(make_model, torch.randn(2, 4, 8, requires_grad=True), "matmuls", num_steps=2, num_backwards=2)


def test_kept_results_pass_the_hooks_that_are_set_outside():
    seen = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    model = Net(num_blocks=1)
    apply_activation_checkpointing(model, layers="blocks.*", save=SavePolicy("matmuls"), determinism_check="none")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.randn(4, 8)).sum()
    assert (4, 32) in seen


def test_a_second_run_with_other_operators_is_an_error():
    class Moody(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            wide = self.up(hidden) if torch._C._current_graph_task_id() == -1 else hidden @ self.up.weight.t()
            return self.down(F.gelu(wide))

    model = Net(Moody, 1)
    apply_activation_checkpointing(model, layers="blocks.*", save=SavePolicy("matmuls"))
    loss = model(torch.randn(4, 8)).sum()
    with pytest.raises(
        RecomputationError,
        match=r"^recomputation of layer blocks\.0 \(Moody\) diverged .* ran aten\.mm\.default\(.* where",
    ):
        loss.backward()


def test_noise_in_front_of_a_kept_product_is_an_error():
    """Both outputs agree, since the product is taken from the first run."""
    generator = np.random.default_rng(0)

    class Noisy(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            return self.down(hidden.repeat(1, 4) * float(generator.random()))

    model = Net(Noisy, 1)
    apply_activation_checkpointing(model, layers="blocks.*", save=SavePolicy("matmuls"))
    loss = (model(torch.randn(4, 8)) * model.blocks[0].up.bias.mean()).sin().sum()
    with pytest.raises(RecomputationError, match=r"Saved tensor \d has other values"):
        loss.backward()


def test_nothing_is_alive_after_a_step():
    model = Net()
    apply_activation_checkpointing(model, save=SavePolicy("matmuls"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            seen: list[weakref.ref] = []

            class Watch(TorchDispatchMode):
                def __torch_dispatch__(self, func, types, args=(), kwargs=None, seen=seen):
                    output = func(*args, **(kwargs or {}))
                    if func is aten.addmm.default:
                        seen.append(weakref.ref(output.untyped_storage()))
                    return output

            with Watch():
                model(torch.randn(4, 8)).sum().backward()
            assert len(seen) > 5
            assert not any(reference() is not None for reference in seen)
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("model", [TinyCNN, TinyGPT])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dynamo's own
def test_compiled_layers_keep_them_too(model):
    torch._dynamo.reset()
    results = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        net = model().eval()
        inputs = net.samples(4)[:][0]
        if not is_plain:
            apply_activation_checkpointing(net, save=SavePolicy("matmuls"))
        net = torch.compile(net, backend="aot_eager")
        net(inputs).square().sum().backward()
        results.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(*results, strict=True))
