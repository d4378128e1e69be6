"""An activation overwrites its input only if nobody can tell, and then gradients are equal to the bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.helpers import saved_bytes
from support.networks import resnet50
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.in_place_fusion import inplace_activations
from lightning_vram.techniques.in_place_fusion.inplace_activations import InplaceObserver, set_inplace
from lightning_vram.techniques.in_place_fusion.recomputation.stage import Recomputation

C = 8
KEPT = "the module before keeps its output for backward"
READ_AGAIN = "its input is read again"
READ_BEFORE = "its input is read by another before"
INPUT = "its input is the batch or a parameter"
HELD = "its input is still held after the step"
HOOK = "a hook sees its input"
VIEW = "its input is a view"
COPIED = "saves nothing: autograd copies its input first"


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


TRAPPED = {
    "dropout": "in place it draws its random numbers with another kernel",
    "bounded": COPIED,
    "elu": "its backward rounds differently in place",
    "on_input": INPUT,
    "read_again": READ_AGAIN,
    "after_sigmoid": KEPT,
    "shared": READ_AGAIN,
    "after_relu": KEPT,
    "hooked": HOOK,
    "returned": HELD,
    "on_view": VIEW,
}


def observe(
    net: nn.Module, run: Callable[[], Any], *, backward: bool = True, keep: bool = True
) -> tuple[InplaceObserver, Any]:
    """Observe one step. ``keep``: hold the result, and with it the graph, beyond the block."""
    output = None
    with InplaceObserver(net) as observer:
        result = run()
        if backward:
            loss_of(result).backward()
        if keep:
            output = result
        del result
    return observer, output


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
    handle = set_inplace(net, names)
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
    handle.remove()
    assert not any(getattr(member, "inplace", False) for member in net.modules())


@pytest.mark.parametrize("backward", [True, False], ids=["step", "forward"])
def test_of_the_traps_none_is_taken_and_the_safe_ones_are(backward: bool) -> None:
    torch.manual_seed(0)
    net, x = randomise(Traps()), torch.randn(2, 3, 8, 8)
    hook = net.hooked.register_forward_pre_hook(lambda *_: None)
    observer, _output = observe(net, lambda: net(x), backward=backward)
    assert observer.refused == TRAPPED
    assert observer.safe == ["after_norm", "after_sum"]
    assert observer.saved_bytes == dict.fromkeys(observer.safe, 2 * C * 8 * 8 * 4)
    hook.remove()
    check_exact(net, x, observer.safe)


@pytest.mark.parametrize("drop", [True, False], ids=["dropped", "held"])
def test_the_verdict_does_not_need_the_graph_to_be_held(drop: bool) -> None:
    torch.manual_seed(0)
    net, x = Traps(), torch.randn(2, 3, 8, 8)
    net.hooked.register_forward_pre_hook(lambda *_: None)
    observer, _output = observe(net, lambda: net(x)[0] * 1 if drop else net(x), backward=False, keep=not drop)
    expected = TRAPPED if not drop else {name: why for name, why in TRAPPED.items() if name != "returned"}
    assert observer.refused == expected


def test_all_activations_of_a_resnet_are_safe() -> None:
    torch.manual_seed(0)
    net, x = randomise(resnet50()), torch.randn(2, 3, 32, 32)
    observer, _ = observe(net, lambda: net(x))
    assert observer.refused == {}
    assert len(observer.safe) == 17
    assert observer.saved_bytes[observer.safe[0]] == 2 * 64 * 16 * 16 * 4
    check_exact(net, x, observer.safe)


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


def read_before(m: Body, x: Tensor) -> Tensor:
    y = m.conv(x)
    squares = y * y
    return m.act(y) + squares


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


def two_readers(m: Body, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.act(y) + m.act(y)


def in_no_grad(m: Body, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.act(m.conv(x))
    return m.conv(y)


def in_inference(m: Body, x: Tensor) -> Tensor:
    with torch.inference_mode():
        m.act(m.conv(x))
    return m.conv(x)


def first_in_checkpoint(m: Body, x: Tensor, *, reentrant: bool = False) -> Tensor:
    return checkpoint(lambda y: m.conv(m.act(y)), m.conv(x), use_reentrant=reentrant)


def exponential(m: Body, x: Tensor) -> Tensor:
    return m.act(m.conv(x).exp())


VERDICTS: dict[str, tuple[Callable[[Body, Tensor], Any], str | None]] = {
    "after a convolution": (lambda m, x: m.act(m.conv(x)), None),
    "after a norm": (lambda m, x: m.act(m.norm(m.conv(x))), None),
    "after an addition in place": (written_before, None),
    "after a sum": (lambda m, x: m.act(m.conv(x) + x), None),
    "called twice": (twice, None),
    "without gradients": (in_no_grad, None),
    "read before": (read_before, READ_BEFORE),
    "its output is written": (overwritten, "its output is overwritten"),
    "kept": (kept, HELD),
    "gradient hook": (gradient_hook, HOOK),
    "leaf": (leaf, INPUT),
    "two readers": (two_readers, READ_BEFORE),
    "inference mode": (in_inference, "its input is not a tensor of a plain forward"),
    "exponential": (exponential, KEPT),
    "softmax": (lambda m, x: m.act(m.conv(x).softmax(1)), KEPT),
    "tanh in place": (lambda m, x: m.act(m.conv(x).tanh_()), KEPT),
    "after itself": (lambda m, x: m.act(m.act(m.conv(x))), KEPT),
    "expanded": (lambda m, x: m.act(m.conv(x).mean((2, 3), keepdim=True).expand(2, 3, 8, 8)), VIEW),
    "by keyword": (lambda m, x: m.act(input=m.conv(x)), "its input is not a tensor of a plain forward"),
    "never called": (lambda m, x: m.conv(x), "it was not called"),
}


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("backward", [True, False], ids=["step", "forward"])
@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_names_the_reason(name: str, backward: bool, recompute: bool) -> None:
    body, reason = VERDICTS[name]
    torch.manual_seed(0)
    net, x = randomise(Body(body)), torch.randn(2, 3, 8, 8)
    recomputation = Recomputation(net, min_bytes=0)

    def run() -> Tensor:
        if not recompute:
            return net(x)
        with recomputation:
            return net(x)

    observer, _output = observe(net, run, backward=backward)
    assert observer.refused == ({} if reason is None else {"act": reason})
    assert observer.safe == (["act"] if reason is None else [])
    assert list(observer.saved_bytes) == observer.safe
    if reason is None:
        check_exact(net, x, observer.safe)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_reads_again_is_not_overwritten(reentrant: bool) -> None:
    net, x = Body(lambda m, x: first_in_checkpoint(m, x, reentrant=reentrant)), torch.randn(2, 3, 8, 8)
    for backward, keep in ((True, True), (False, True), (False, False)):
        observer, _output = observe(net, lambda: net(x), backward=backward, keep=keep)
        assert observer.safe == []


def test_a_module_that_takes_turns_is_refused_for_its_bad_call() -> None:
    net, x = Body(lambda m, x: m.act(m.conv(x)) + m.act(x)), torch.randn(2, 3, 8, 8)
    observer, _ = observe(net, lambda: net(x))
    assert observer.refused == {"act": INPUT}


ALONE = {
    "negative slope": (nn.LeakyReLU(-0.1), "its backward does not work in place with a negative slope"),
    "ReLU6": (nn.ReLU6(), COPIED),
    "SiLU": (nn.SiLU(), COPIED),
    "RReLU": (nn.RReLU(), "in place it draws its random numbers with another kernel"),
    "SELU": (nn.SELU(), "its backward rounds differently in place"),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_gains_nothing_or_is_not_exact_is_refused_at_once(name: str) -> None:
    activation, reason = ALONE[name]
    net = Body(lambda m, x: m.act(m.conv(x)), activation)
    observer, _ = observe(net, lambda: net(torch.randn(2, 3, 8, 8)))
    assert observer.refused == {"act": reason}


class Louder(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_an_activation_with_a_forward_of_its_own_is_refused() -> None:
    net = Body(lambda m, x: m.act(m.conv(x)), Louder())
    observer, _ = observe(net, lambda: net(torch.randn(2, 3, 8, 8)))
    assert observer.refused == {"act": "it is not a stock activation"}


HOOKS: dict[str, Callable[[Body], Any]] = {
    "forward": lambda m: m.act.register_forward_hook(lambda *_: None),
    "full backward": lambda m: m.act.register_full_backward_hook(lambda *_: None),
    "of the module before": lambda m: m.conv.register_forward_hook(lambda *_: None),
    "of all": lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", HOOKS)
def test_what_a_hook_sees_is_not_overwritten(name: str) -> None:
    net = Body(lambda m, x: m.act(m.conv(x)))
    hook = HOOKS[name](net)
    try:
        observer, _ = observe(net, lambda: net(torch.randn(2, 3, 8, 8, requires_grad=True)))
    finally:
        hook.remove()
    assert observer.safe == []


def test_a_step_that_fails_proves_nothing_and_leaves_nothing() -> None:
    def fail(m: Body, x: Tensor) -> Tensor:
        m.act(m.conv(x))
        raise ArithmeticError

    net = Body(fail)
    observer = InplaceObserver(net)
    with pytest.raises(ArithmeticError), observer:
        net(torch.randn(2, 3, 8, 8))
    assert observer.safe == []
    assert set(observer.refused) == {"act"}
    assert not any(member._forward_hooks or member._forward_pre_hooks for member in net.modules())


def test_the_observed_step_has_the_bits_of_a_plain_one() -> None:
    torch.manual_seed(0)
    net, x = randomise(Traps()), torch.randn(2, 3, 8, 8)
    plain = copy.deepcopy(net)
    torch.manual_seed(1)
    observe(net, lambda: net(x))
    torch.manual_seed(1)
    loss_of(plain(x)).backward()
    for (name, a), b in zip(plain.named_parameters(), net.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), net.buffers(), strict=True))


def test_a_name_without_a_switch_is_refused_and_nothing_is_changed() -> None:
    net = Traps()
    for name in ("conv", "missing"):
        with pytest.raises(ValueError, match=f"^'{name}' is not a module with a switch `inplace`.$"):
            set_inplace(net, ["after_norm", name])
    assert not net.after_norm.inplace


def test_what_was_in_place_before_stays() -> None:
    net = nn.Sequential(nn.ReLU(inplace=True), nn.ReLU())
    handle = set_inplace(net, ["0", "1"])
    handle.remove()
    handle.remove()
    assert [member.inplace for member in net] == [True, False]


def test_after_leaky_relu_one_map_less_is_kept() -> None:
    num_blocks, x = 4, torch.randn(2, C, 8, 8)
    net = nn.Sequential(
        *(
            member
            for _ in range(num_blocks)
            for member in (nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), nn.LeakyReLU(), nn.Conv2d(C, C, 1))
        )
    )
    observer, _ = observe(net, lambda: net(x))
    assert len(observer.safe) == num_blocks
    before = saved_bytes(net, lambda: net(x).sum())
    set_inplace(net, observer.safe)
    spared_bytes = before - saved_bytes(net, lambda: net(x).sum())
    assert spared_bytes == num_blocks * x.nbytes == sum(observer.saved_bytes.values())


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
    assert inplace_activations._DO_NOT_KEEP_OUTPUT - seen <= of_other_devices
