"""Checkpointed layers: the same result to the bit, the bytes worked out, the module the user knows."""

import copy
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from support.helpers import assert_equal_weights, describe_module
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing

FLOAT = 4


class Calls(list):
    """What a recomputation does not take for a plain container."""


class Block(nn.Module):
    """Counts its forwards in ``calls``; two linear layers with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.3)
        self.calls = Calls()  # not a list: a recomputation works on copies of those

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls.append(torch.is_grad_enabled())
        return hidden + scale * self.dropout(self.down(torch.tanh(self.up(hidden))))


class Net(nn.Module):
    def __init__(self, make_block=Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def train(model: nn.Module, compute_loss, num_steps: int = 5) -> int:
    """Train with AdamW from a fixed random state; returns the bytes saved for backward in the last step."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        with track_memory(model) as tracker:
            compute_loss(model).backward()
        optimizer.step()
    return tracker.timeline.saved_for_backward_bytes


def assert_trains_as_plain(make_model, compute_loss, num_steps: int = 5, **arguments) -> tuple[int, int]:
    """Returns the bytes saved for backward, plain and checkpointed."""
    torch.manual_seed(0)
    plain = make_model()
    checkpointed = copy.deepcopy(plain)
    apply_activation_checkpointing(checkpointed, **arguments)
    plain_bytes = train(plain, compute_loss, num_steps)
    checkpointed_bytes = train(checkpointed, compute_loss, num_steps)
    assert_equal_weights(checkpointed, plain)
    for one, other in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)
    return plain_bytes, checkpointed_bytes


# --- bytes ---


@pytest.mark.parametrize("segments", ["sqrt", 5])
def test_segments_of_an_mlp_stack_save_three_quarters_and_train_the_same(segments):
    inputs = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))
    plain_bytes, kept_bytes = assert_trains_as_plain(
        lambda: nn.Sequential(*(layer for _ in range(36) for layer in (nn.Linear(24, 24), nn.Dropout(0.1), nn.GELU()))),
        lambda model: model(inputs).square().mean(),
        num_steps=2,
        segments=segments,
    )
    number = 6 if segments == "sqrt" else segments
    assert kept_bytes <= 0.25 * plain_bytes
    # the input is there before; each other segment has one, and the loss squares the last output
    assert kept_bytes - number * inputs.nbytes in range(16)


def test_a_checkpointed_layer_keeps_its_input_and_nothing_else():
    rows, width = 16, 8
    hidden = torch.randn(rows, width)
    model = Net(num_blocks=3)
    apply_activation_checkpointing(model, determinism_check="none")  # or some samples of the outputs of a first step
    # inputs of blocks 1 and 2 (block 0's was there before), the output that is squared, loss and its gradient
    expected = 3 * rows * width * FLOAT + 2 * FLOAT
    for _ in range(2):
        assert train(model, lambda model: model(hidden).square().sum(), num_steps=1) == expected


# --- the same result, whatever a layer does ---


class Nested(nn.Module):
    """Takes and gives nests of tensors, with None and numbers in between."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, state: dict) -> dict:
        out = self.block(state["hidden"][0])
        return {"hidden": [out, state["count"]], "count": state["count"] + 1, "none": None}


class NestedNet(Net):
    def __init__(self) -> None:
        super().__init__(Nested)

    def forward(self, hidden: Tensor) -> Tensor:
        state = {"hidden": [hidden, 0], "count": 0, "none": None}
        for block in self.blocks:
            state = block(state)
        assert state["count"] == len(self.blocks)
        return state["hidden"][0]


class SharedNet(Net):
    """Runs each layer twice in a step."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(super().forward(hidden))


class CountingBlock(Block):
    """Has buffers that it writes in place and anew, and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.in_place += hidden.detach().abs().mean()
        self.anew = 0.9 * self.anew + 0.1 * hidden.detach().abs().mean()
        return super().forward(hidden * (1 + self.in_place + self.anew))


class NormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.norm(hidden))


class StatefulBlock(Block):
    """Counts in plain Python, remembers a tensor, collects losses."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.remembered = torch.zeros(())
        self.losses: list[Tensor] = []
        self.nested = {"inner": Counter()}

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_calls += 1
        self.nested["inner"]["calls"] += 1
        assert self.nested["inner"]["calls"] == self.num_calls
        hidden = torch.tanh(hidden / self.num_calls) * (1 + self.remembered)
        self.remembered = hidden.detach().mean()
        self.losses.append(hidden.square().mean())
        assert len(self.losses) == 1
        return super().forward(hidden)


class StatefulNet(Net):
    def __init__(self) -> None:
        super().__init__(StatefulBlock)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        for block in self.blocks:
            hidden = hidden + block.losses.pop()
        return hidden


class OverwritingBlock(Block):
    """Starts with an in-place activation, as pre-activation networks do."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(F.relu_(hidden))))


class OverwritingNet(Net):
    def __init__(self) -> None:
        super().__init__(OverwritingBlock)
        self.stem = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.stem(hidden))


def half_frozen_block() -> Block:
    block = Block()
    block.up.requires_grad_(False)
    return block


def spectral_block() -> Block:
    block = Block()
    spectral_norm(block.up)
    return block


class FastWeightsNet(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            fast = {name: 2 * parameter for name, parameter in block.named_parameters()}
            hidden = torch.func.functional_call(block, fast, (hidden,))
        return hidden


class AppendingBlock(Block):
    def forward(self, hidden: Tensor, seen: list) -> Tensor:
        seen.append(hidden.square().mean())
        return super().forward(hidden)


class AppendingNet(Net):
    def __init__(self) -> None:
        super().__init__(AppendingBlock)

    def forward(self, hidden: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in self.blocks:
            hidden = block(hidden, seen)
        return hidden + torch.stack(seen).sum()


LAYERS = {
    "dropout": Net,
    "nested inputs and outputs": NestedNet,
    "layers used twice": SharedNet,
    "buffers written in forward": partial(Net, CountingBlock),
    "batch norm": partial(Net, NormBlock),
    "spectral norm": partial(Net, spectral_block),
    "state in plain attributes": StatefulNet,
    "frozen weights": partial(Net, half_frozen_block),
    "inputs it overwrites": OverwritingNet,
    "weights of another": FastWeightsNet,
    "a list it appends to": AppendingNet,
}


@pytest.mark.parametrize("make_model", LAYERS.values(), ids=LAYERS)
def test_result_is_that_of_the_plain_model(make_model):
    hidden = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    plain, checkpointed = assert_trains_as_plain(make_model, lambda model: model(hidden).square().mean())
    assert checkpointed < plain


def test_chosen_layers_run_twice_and_without_gradients_once():
    model = Net(num_blocks=4)
    handle = apply_activation_checkpointing(model, every_n_layers=2)
    assert [layer.name for layer in handle.selection.layers] == ["blocks.0", "blocks.2"]
    model(torch.randn(2, 8)).sum().backward()
    assert [len(block.calls) for block in model.blocks] == [2, 1, 2, 1]
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert [len(block.calls) for block in model.blocks] == [3, 2, 3, 2]


def test_hooks_of_the_layer_fire_once_and_those_inside_in_both_runs():
    model = Net(num_blocks=1)
    block, fired = model.blocks[0], []
    apply_activation_checkpointing(model, layers="Block")
    for module, name in ((block, "outer"), (block.up, "inner")):
        module.register_forward_pre_hook(lambda *_, name=name: fired.append(f"{name} pre"))
        module.register_forward_hook(lambda *_, name=name: fired.append(f"{name} post"))
        module.register_full_backward_hook(lambda *_, name=name: fired.append(f"{name} backward"))
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    inner = ["inner pre", "inner post"]
    assert fired == ["outer pre", *inner, "outer post", *inner, "inner backward", "outer backward"]


# --- the module the user knows ---


def test_the_module_is_the_one_the_user_knows_and_undo_leaves_no_trace():
    plain, model = Net(), Net()
    before = describe_module(model)
    handle = apply_activation_checkpointing(model)
    assert describe_module(model) != before
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(isinstance(block, Block) for block in model.blocks)
    assert repr(model) == repr(plain)
    for _ in range(2):
        handle.remove()
        assert describe_module(model) == before


@pytest.mark.parametrize("make_twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_is_a_plain_module_that_stands_alone(make_twin):
    model = Net()
    before = describe_module(model)
    apply_activation_checkpointing(model)
    twin = make_twin(model)
    assert describe_module(twin) == before
    twin(torch.randn(2, 8)).sum().backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    apply_activation_checkpointing(twin)


def test_a_forward_set_on_the_instance_is_checkpointed_and_comes_back():
    model = Net(num_blocks=2)
    block, calls = model.blocks[0], []

    def patched(hidden: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return Block.forward(block, hidden)

    block.forward = patched
    handle = apply_activation_checkpointing(model)
    model(torch.randn(2, 8)).sum().backward()
    assert len(calls) == 2
    handle.remove()
    assert block.forward is patched


def test_a_compiled_submodule_is_checkpointed_inside():
    model = Net(num_blocks=2)
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    inner = model.blocks[0]._orig_mod
    handle = apply_activation_checkpointing(model)
    assert type(inner) is not Block
    model(torch.randn(2, 8)).sum().backward()
    handle.remove()
    assert type(inner) is Block


def test_under_torch_func_layers_run_plain():
    model = Net(num_blocks=2).eval()
    parameters = dict(model.named_parameters())
    hidden = torch.randn(4, 8)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (hidden,)).square().mean()

    plain = torch.func.grad(loss)(parameters)
    apply_activation_checkpointing(model)
    checkpointed = torch.func.grad(loss)(parameters)
    assert all(torch.equal(checkpointed[name], plain[name]) for name in plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make_block", "is_left_plain"),
    [(CountingBlock, True), (NormBlock, False), (spectral_block, True)],
    ids=["buffer it reads", "batch norm", "spectral norm"],
)
def test_compiled_layers_that_may_read_what_they_wrote_are_left_plain(make_block, is_left_plain):
    model = Net(make_block, num_blocks=2)
    apply_activation_checkpointing(model)
    states = [vars(block)["_activation_checkpointing"] for block in model.blocks]
    assert [not state.is_compilable for state in states] == [is_left_plain] * 2


class ResidualBlock(Block):
    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(hidden.relu_()))) * residual


def test_a_layer_that_overwrites_shared_memory_is_refused():
    model = Net(ResidualBlock, num_blocks=1)
    apply_activation_checkpointing(model, layers="ResidualBlock")
    hidden = torch.randn(2, 8, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match=r"^layer blocks\.0 \(ResidualBlock\) overwrites an input that shares mem"):
        model.blocks[0](hidden, hidden.view(2, 8))


def test_a_layer_that_overwrites_its_input_now_and_then_is_refused():
    class Moody(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            self.calls.append(True)
            return torch.tanh(self.up(hidden.relu_() if len(self.calls) > 1 else hidden))

    model = Net(Moody, num_blocks=1)
    apply_activation_checkpointing(model, layers="Moody")
    model(torch.randn(2, 8) * torch.ones((), requires_grad=True))
    with pytest.raises(RuntimeError, match=r"^layer blocks\.0 \(Moody\) overwrites its input in some forwards and"):
        model(torch.randn(2, 8) * torch.ones((), requires_grad=True))


# --- refusals ---


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_layer_that_cannot_change_its_class_changes_nothing():
    model = Net(num_blocks=2)
    model.scripted = torch.jit.script(nn.Linear(2, 2))
    before = describe_module(model)
    with pytest.raises(
        ValueError, match=r"cannot be checkpointed: .* it is scripted or traced\. Choose other layers\."
    ):
        apply_activation_checkpointing(model, layers=["Block", "scripted"])
    assert describe_module(model) == before


def test_twice_is_refused_and_the_first_stays():
    model = Net()
    apply_activation_checkpointing(model, layers="blocks.1")
    with pytest.raises(ValueError, match=r"^layer Block is checkpointed already\. Use one ActivationCheckpointing"):
        apply_activation_checkpointing(model, layers="Block")
    model(torch.randn(2, 8)).sum().backward()
    assert [len(block.calls) for block in model.blocks] == [1, 2, 1]
