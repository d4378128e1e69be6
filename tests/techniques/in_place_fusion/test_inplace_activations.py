"""An activation overwrites its input only if nobody can tell, and then gradients are equal to the bit."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.helpers import saved_bytes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.in_place_fusion import observed_links
from lightning_vram.techniques.in_place_fusion.observed_links import StepObserver
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

C = 8


class Traps(nn.Module):
    """Activations that are safe, and all that may look so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, C, 3, padding=1), nn.BatchNorm2d(C)
        self.same, self.point = nn.Conv2d(C, C, 3, padding=1), nn.Conv2d(C, C, 1)
        self.on_input, self.after_norm, self.read_again = nn.ReLU(), nn.LeakyReLU(), nn.ReLU()
        self.after_sigmoid, self.shared, self.after_relu = nn.ReLU(), nn.LeakyReLU(), nn.LeakyReLU()
        self.dropout, self.hooked, self.returned = nn.Dropout(0.1), nn.ReLU(), nn.ReLU()
        self.on_view, self.after_sum, self.bounded = nn.ReLU(), nn.LeakyReLU(), nn.ReLU6()
        self.elu = nn.ELU()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.on_input(x)
        a = self.after_norm(self.norm(self.conv(x)))
        b = self.same(a)
        c = self.read_again(b) + b
        d = self.after_sigmoid(torch.sigmoid(self.point(c)))
        e = self.shared(self.point(d))
        f = self.point(e)
        g = self.shared(f) + f
        h = self.dropout(self.after_relu(F.relu(g)))
        i = self.hooked(self.point(h))
        j = self.point(i)
        k = self.point(self.returned(j))
        m = self.point(self.on_view(k.flatten(1)).view_as(k))
        m = self.after_sum(m + k)
        return self.elu(self.bounded(self.point(m))), j


def observe(
    net: nn.Module, run: Callable[[], Any], *, backward: bool = True, keep: bool = True
) -> tuple[list[str], Any]:
    """The activations that one step proves safe. ``keep``: hold the result, and with it the graph, beyond the block."""
    output = None
    with StepObserver(net, overwriting=True) as observer:
        result = run()
        if backward:
            loss_of(result).backward()
        if keep:
            output = result
        del result
    names = {module: name for name, module in net.named_modules()}
    return [names[module] for module in observer.overwriting], output


def loss_of(output: Any) -> Tensor:
    return sum(part.square().sum() for part in (output if isinstance(output, tuple) else (output,)))


def randomise(net: nn.Module) -> nn.Module:
    for name, parameter in net.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.3)
    return net


def check_exact(net: nn.Module, x: Tensor, names: list[str]) -> None:
    """Two training steps with the chosen activations in place, and without: the same bits."""
    plain = copy.deepcopy(net)
    activations = [net.get_submodule(name) for name in names]
    for activation in activations:
        activation.inplace = True
    assert sum(getattr(member, "inplace", False) for member in net.modules()) == len(names)
    for seed in range(2):
        results = []
        for member in (plain, net):
            torch.manual_seed(seed)
            member.zero_grad()
            loss = loss_of(member(x.clone()))
            loss.backward()
            results.append(loss.detach())
            with torch.no_grad():
                for parameter in member.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=1e-4)
        assert torch.equal(*results)
        for (name, a), b in zip(plain.named_parameters(), net.parameters(), strict=True):
            assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name
        assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), net.buffers(), strict=True))
    for activation in activations:
        activation.inplace = False


@pytest.mark.parametrize("backward", [True, False], ids=["step", "forward"])
def test_of_the_traps_none_is_taken_and_the_safe_ones_are(backward: bool) -> None:
    torch.manual_seed(0)
    net, x = randomise(Traps()), torch.randn(2, 3, 8, 8)
    hook = net.hooked.register_forward_pre_hook(lambda *_: None)
    safe, _output = observe(net, lambda: net(x), backward=backward)
    assert safe == ["after_norm", "after_sum"]
    hook.remove()
    check_exact(net, x, safe)


class Body(nn.Module):
    """One activation, and how it is called."""

    def __init__(self, body: Callable[["Body", Tensor], Any], activation: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.act = activation if activation is not None else nn.LeakyReLU(0.1)
        self.body = body
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def written_before(m: Body, x: Tensor) -> Tensor:
    y = m.norm(m.conv(x))
    y += x
    return m.act(y)


def overwritten(m: Body, x: Tensor) -> Tensor:
    y = m.act(m.conv(x))
    y += x
    return y


def kept(m: Body, x: Tensor) -> Tensor:
    m.kept = m.conv(x)
    return m.act(m.kept)


def gradient_hook(m: Body, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.register_hook(lambda grad: grad)
    return m.act(y)


def leaf(m: Body, x: Tensor) -> Tensor:
    return m.act(torch.zeros_like(x, requires_grad=True)) + m.conv(x)


def twice(m: Body, x: Tensor) -> Tensor:
    return m.act(m.conv(m.act(m.conv(x))))


def in_inference(m: Body, x: Tensor) -> Tensor:
    with torch.inference_mode():
        m.act(m.conv(x))
    return m.conv(x)


def first_in_checkpoint(m: Body, x: Tensor, *, reentrant: bool = False) -> Tensor:
    return checkpoint(lambda y: m.conv(m.act(y)), m.conv(x), use_reentrant=reentrant)


VERDICTS: dict[str, tuple[Callable[[Body, Tensor], Any], bool]] = {
    "after a convolution": (lambda m, x: m.act(m.conv(x)), True),
    "after an addition in place": (written_before, True),
    "called twice": (twice, True),
    "its output is written": (overwritten, False),
    "kept": (kept, False),
    "gradient hook": (gradient_hook, False),
    "leaf": (leaf, False),
    "inference mode": (in_inference, False),
}


@pytest.mark.parametrize(("backward", "recompute"), [(True, False), (False, True)], ids=["step", "forward, recomputed"])
@pytest.mark.parametrize("name", VERDICTS)
def test_one_call_decides(name: str, backward: bool, recompute: bool) -> None:
    body, is_safe = VERDICTS[name]
    torch.manual_seed(0)
    net, x = randomise(Body(body)), torch.randn(2, 3, 8, 8)
    context = Recomputation(net, min_bytes=0) if recompute else nullcontext()

    def run() -> Tensor:
        with context:
            return net(x)

    safe, _output = observe(net, run, backward=backward)
    assert safe == (["act"] if is_safe else [])
    if is_safe:
        check_exact(net, x, safe)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_reads_again_is_not_overwritten(reentrant: bool) -> None:
    net, x = Body(lambda m, x: first_in_checkpoint(m, x, reentrant=reentrant)), torch.randn(2, 3, 8, 8)
    for backward, keep in ((True, True), (False, False)):
        safe, _output = observe(net, lambda: net(x), backward=backward, keep=keep)
        assert safe == []


class Louder(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


ALONE = {
    "negative slope": nn.LeakyReLU(-0.1),
    "ReLU6": nn.ReLU6(),
    "RReLU": nn.RReLU(),
    "a forward of its own": Louder(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_gains_nothing_or_is_not_exact_is_refused_at_once(name: str) -> None:
    net = Body(lambda m, x: m.act(m.conv(x)), ALONE[name])
    assert observe(net, lambda: net(torch.randn(2, 3, 8, 8)))[0] == []


def test_after_leaky_relu_one_map_less_is_kept() -> None:
    num_blocks, x = 4, torch.randn(2, C, 8, 8)
    net = nn.Sequential(
        *(
            member
            for _ in range(num_blocks)
            for member in (nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), nn.LeakyReLU(), nn.Conv2d(C, C, 1))
        )
    )
    safe, _ = observe(net, lambda: net(x))
    assert len(safe) == num_blocks
    before = saved_bytes(net, lambda: net(x).sum())
    for name in safe:
        net.get_submodule(name).inplace = True
    assert before - saved_bytes(net, lambda: net(x).sum()) == num_blocks * x.nbytes


def test_nodes_said_to_keep_nothing_do_not_save_their_first_result() -> None:
    x = torch.randn(2, 4, 4, 4, requires_grad=True)
    m = torch.randn(4, 4, requires_grad=True)
    batches = torch.randn(2, 4, 4, requires_grad=True)
    made = [
        x + x,
        x - x,
        x * x,
        x / x,
        torch.cat([x, x]),
        x.clone(),
        x.double(),
        m @ m,
        torch.addmm(m, m, m),
        torch.bmm(batches, batches),
        torch.baddbmm(batches, batches, batches),
        F.conv2d(x, x),
        F.batch_norm(x, None, None, training=True),
        F.layer_norm(x, [4]),
        F.group_norm(x, 2),
        F.avg_pool2d(x, 2),
        F.max_pool2d(x, 2),
        F.interpolate(x, scale_factor=2),
        F.interpolate(x, scale_factor=2, mode="bilinear"),
    ]
    seen = set()
    for tensor in made:
        node, storage = tensor.grad_fn, tensor.untyped_storage().data_ptr()
        seen.add(node.name())
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        flat = [part for value in saved for part in (value if isinstance(value, tuple) else (value,))]
        assert all(part.untyped_storage().data_ptr() != storage for part in flat if isinstance(part, Tensor))
    of_other_devices = {"CudnnBatchNormBackward0", "MiopenBatchNormBackward0", "FusedRmsNormBackward0"}
    assert observed_links._DO_NOT_KEEP_OUTPUT - seen <= of_other_devices
