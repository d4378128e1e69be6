"""The rules of PyTorch's own checkpoint, not reentrant, side by side with ours: the same calls, errors and memory."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.private_names.torch import innermost_hooks
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing

NUM_WARM_UP = 2  # calls in which a layer is learned and compared
WIDTH = 8


class Log:
    """What a recomputation does not take for a plain container."""

    def __init__(self) -> None:
        self.num_runs = 0
        self.fails = False


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.log = Log()
        self.ends = Log()

    def forward(self, x: Tensor) -> Tensor:
        self.log.num_runs += 1
        hidden = self.down(self.dropout(torch.tanh(self.norm(self.up(x)))))
        if self.log.fails:
            raise ValueError("it fails")
        self.ends.num_runs += 1
        return hidden + 1


class ByTorch(nn.Module):
    """A layer under PyTorch's checkpoint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return output


class Holder(nn.Module):
    """A layer in another, after something else."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.sin(self.layer(torch.cos(x))))


def by_us(layer: nn.Module) -> nn.Module:
    apply_activation_checkpointing(nn.ModuleList([layer]), layers="0")
    return layer


HOW: dict[str, Callable[[nn.Module], nn.Module]] = {"plain": lambda layer: layer, "torch": ByTorch, "us": by_us}


def make(how: str) -> tuple[nn.Module, Layer]:
    """A layer that is known already, as a module to call and itself."""
    torch.manual_seed(0)
    layer = Layer()
    module = HOW[how](layer)
    for _ in range(NUM_WARM_UP):
        module(make_input()).sum().backward()
    layer.zero_grad()
    layer.log.num_runs = layer.ends.num_runs = 0
    torch.manual_seed(1)
    return module, layer


def make_input() -> Tensor:
    return torch.randn(4, WIDTH, requires_grad=True)


# --- programs: each returns what has to be equal ---


def backward_twice(module: nn.Module, layer: Layer) -> list[Tensor]:
    loss = module(make_input()).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    return [parameter.grad for parameter in layer.parameters()]


def penalty(module: nn.Module, layer: Layer) -> list[Tensor]:
    x = make_input()
    (slope,) = grad(module(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters() if parameter.grad is not None)]


def one_gradient(module: nn.Module, layer: Layer) -> list[Tensor]:
    return list(grad(module(make_input()).sum(), layer.down.weight))


def backward_in_a_thread(module: nn.Module, layer: Layer) -> list[Tensor]:
    x = make_input()
    thread = threading.Thread(target=module(x).sum().backward)
    thread.start()
    thread.join()
    return [x.grad]


def written_result(module: nn.Module, layer: Layer) -> list[Tensor]:
    output = module(make_input())
    output.mul_(2)
    output.sum().backward()
    return [layer.up.weight.grad]


def failing_second_run(module: nn.Module, layer: Layer) -> list[Tensor]:
    loss = module(make_input()).sum()
    random_state = torch.get_rng_state()
    handle = layer.norm.register_forward_pre_hook(_fail)
    with suppress(ValueError):
        loss.backward(retain_graph=True)
    handle.remove()
    assert innermost_hooks() is None
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random_state)
    layer.zero_grad()
    loss.backward()
    return [layer.up.weight.grad]


def _fail(*_: object) -> None:
    raise ValueError("it fails")


PROGRAMS = [
    *(backward_twice, penalty, one_gradient, backward_in_a_thread, written_result),
    failing_second_run,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_those_of_the_plain_layer_and_runs_those_of_torchs_checkpoint(program):
    results, runs = {}, {}
    for how in HOW:
        module, layer = make(how)
        results[how] = program(module, layer)
        runs[how] = layer.log.num_runs, layer.ends.num_runs

    for how in ("torch", "us"):
        assert len(results[how]) == len(results["plain"])
        assert all(map(torch.equal, results[how], results["plain"]))
    assert runs["us"] == runs["torch"]


def parameter(module: nn.Module, layer: Layer) -> None:
    output = module(make_input())
    with torch.no_grad():
        layer.down.weight.mul_(2)
    output.sum().backward()


def input_by_its_base(module: nn.Module, layer: Layer) -> None:
    base = torch.randn(2 * 4, WIDTH)
    output = module(base[:4])
    base[0].add_(1)
    output.sum().backward()


def input_after_a_backward(module: nn.Module, layer: Layer) -> None:
    x = make_input() * 1
    output = module(x)
    output.sum().backward(retain_graph=True)
    x.detach().add_(1)
    output.sum().backward()


def test_an_overwritten_weight_is_an_error_as_in_the_plain_layer():
    """PyTorch's checkpoint computes with the new one, and gives the gradient of neither."""
    for how in ("plain", "us"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            parameter(*make(how))


@pytest.mark.parametrize("program", [input_by_its_base, input_after_a_backward])
def test_errors_are_those_of_torchs_checkpoint(program):
    kinds, gradients = {}, {}
    for how in ("torch", "us"):
        module, layer = make(how)
        try:
            program(module, layer)
            kinds[how] = None
        except Exception as found:
            kinds[how] = type(found)
        gradients[how] = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    assert kinds == {"torch": RuntimeError, "us": RuntimeError}
    assert all(map(torch.equal, gradients["us"], gradients["torch"]))


def test_a_failed_forward_leaves_nothing_behind():  # PyTorch's checkpoint left its hooks, up to 2.11
    module, layer = make("us")
    layer.log.fails = True
    with pytest.raises(ValueError, match="it fails"):
        module(make_input())
    layer.log.fails = False
    assert innermost_hooks() is None
    module(make_input()).sum().backward()
    assert layer.up.weight.grad is not None


@pytest.mark.parametrize(("inner", "outer"), [("us", "us"), ("torch", "us"), ("us", "torch")])
def test_one_inside_of_another_runs_as_often_as_with_torch_alone(inner, outer):
    gradients, runs = [], []
    for kinds in (("plain", "plain"), (inner, outer), ("torch", "torch")):
        torch.manual_seed(0)
        layer = Layer()
        module = HOW[kinds[1]](Holder(HOW[kinds[0]](layer)))
        for _ in range(NUM_WARM_UP + 1):
            module.zero_grad()
            layer.log.num_runs = 0
            x = make_input()
            module(x).sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in module.parameters())])
        runs.append(layer.log.num_runs)
    assert all(map(torch.equal, gradients[1], gradients[0]))
    assert runs[1] == runs[2]


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("runs_backward", [True, False])
def test_nothing_waits_for_the_garbage_collector(runs_backward):
    module, _ = make("us")
    with without_collector():
        x = make_input()
        hidden = x * 1
        memory = ref(hidden.untyped_storage())
        output = module(hidden).sum()
        del hidden
        assert memory() is not None
        if runs_backward:
            output.backward()
        del output
        assert memory() is None


def test_memory_is_that_of_torchs_checkpoint():
    found = {}
    for how in ("torch", "us"):
        torch.manual_seed(0)
        module = nn.Sequential(*(HOW[how](Layer()) for _ in range(3)))
        for _ in range(NUM_WARM_UP + 1):
            module.zero_grad()
            with track_memory(module) as tracker:
                module(torch.randn(64, WIDTH)).square().sum().backward()
        found[how] = tracker.timeline.peak_bytes, tracker.timeline.saved_for_backward_bytes
    assert found["us"] == found["torch"]
