"""Selective checkpointing: what is kept, what runs again, and that nothing else changes."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram import track_memory
from lightning_vram.core.recomputed_saves import RecomputationError
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy

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


class NoisyBlock(Block):
    """Draws random numbers, and again behind them."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden * torch.rand_like(hidden).sin())


def test_a_kept_operator_that_draws_random_numbers_leaves_the_generator_where_it_was():
    hidden = torch.randn(4, 8, requires_grad=True)
    assert_same_as_plain(lambda: Net(NoisyBlock), hidden, ["aten.rand_like"])
    model = Net(NoisyBlock, 1)
    save = SavePolicy(["aten.rand_like"])
    apply_activation_checkpointing(model, layers="blocks.*", save=save, determinism_check="none")
    loss = model(hidden).sum()
    with Counter() as counter:
        loss.backward()
    assert "aten.rand_like.default" not in counter.names  # else nothing was shown


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


MODELS = {
    "layers that overwrite a result": lambda: Net(InplaceBlock),
    "a net that overwrites what a layer returns": lambda: OverwritingNet(InplaceBlock),
    "nested checkpoints": lambda: Net(NestedBlock),
    "recurrent layers": lambda: Net(lambda: FirstOf(nn.LSTM(8, 8))),
    "writes through views that count on their own": lambda: Net(UnsafeViewBlock),
    "writes through .data": lambda: Net(DataBlock),
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


class Watch(TorchDispatchMode):
    """Refers to the results of all linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.seen.append(weakref.ref(output.untyped_storage()))
        return output


def test_nothing_is_alive_after_a_step():
    model = Net()
    apply_activation_checkpointing(model, save=SavePolicy("matmuls"))
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with Watch() as watch:
                model(torch.randn(4, 8)).sum().backward()
            assert len(watch.seen) > 5
            assert not any(reference() is not None for reference in watch.seen)
    finally:
        gc.enable()
