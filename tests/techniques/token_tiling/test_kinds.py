"""What is found out to mix tokens, and what runs in tiles."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_vram.techniques.token_tiling import apply, apply_token_tiling

WIDTH = 16
KEPT: list[Tensor] = []
OTHER = nn.Parameter(torch.ones(16))
MIXES, READS = "mixes tokens", "mixes tokens, or depends on their positions"


class Function(nn.Module):
    """A function of hidden states and what it needs."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, hidden, *args, **kwargs)


class Positions(nn.Module):
    """A table of positions that is not learned yet."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.zeros(64, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden + self.table[: hidden.shape[1]])


def over_tokens(self: Any, hidden: Tensor) -> Tensor:
    return self.parts[0](hidden.transpose(1, 2)).transpose(1, 2)


def attend(hidden: Tensor) -> Tensor:
    return (hidden @ hidden.mT).softmax(-1).tril() @ hidden


def keep_aside(self: Any, hidden: Tensor) -> Tensor:
    self.aside = hidden.mean()
    return hidden * self.scale


def keep_in_list(self: Any, hidden: Tensor) -> Tensor:
    self.losses = vars(self).get("losses", [])
    self.losses.append(hidden.mean())
    return hidden * self.scale


class Normalised(torch.autograd.Function):
    """Divides the gradient by its norm."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class Gain(nn.Module):
    """Computes with a buffer, or with a tensor that is none."""

    def __init__(self, *, is_buffer: bool = True) -> None:
        super().__init__()
        self.gain = torch.ones(WIDTH)
        if is_buffer:
            del self.gain
            self.register_buffer("gain", torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain


def with_buffer(module: nn.Module) -> nn.Module:
    module.register_buffer("count", torch.zeros(1))
    return module


def zero_linear() -> nn.Linear:
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


BATCH_NORM, LSTM = partial(nn.BatchNorm1d, WIDTH), partial(nn.LSTM, WIDTH, WIDTH, batch_first=True)
ATTENTION = partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True)
CONVOLUTION = partial(nn.Conv1d, WIDTH, WIDTH, 3, padding=1)
ONE_MASK = torch.full((1, 1, WIDTH), 0.5)
FUNCTIONS = {  # why each is left alone, a function of itself and hidden states, and makers of its parts
    "batch norm": ("has a BatchNorm1d", over_tokens, BATCH_NORM),
    "attention": ("has a MultiheadAttention", lambda s, h: s.parts[0](h, h, h)[0], ATTENTION),
    "attention of little weight": (MIXES, lambda s, h: h * s.scale + 1e-9 * attend(h)),
    "attention behind zeros": (READS, lambda s, h: h + s.parts[0](attend(h)), zero_linear),
    "lstm": ("has a LSTM", lambda s, h: s.parts[0](h)[0], LSTM),
    "convolution": ("may mix distant tokens in convolution", over_tokens, CONVOLUTION),
    "softmax": (READS, lambda s, h: s.scale * h.softmax(1)),
    "flip": (READS, lambda s, h: s.scale * h.flip(1)),
    "number of tokens": (READS, lambda s, h: s.scale * h / h.shape[1]),
    "one mask": ("draws random numbers for all tokens at once", lambda s, h: s.scale * h * torch.bernoulli(ONE_MASK)),
    "in place": ("writes to its input", lambda s, h: h.mul_(s.scale)),
    "something kept": ("stores something of its call in 'aside'", keep_aside),
    "something in a list": ("stores something of its call in 'losses'", keep_in_list),
    "a loss kept elsewhere": (
        "stores something of its call outside itself, such as a loss",
        lambda s, h: KEPT.append((h * s.scale).mean()) or h * s.scale,
    ),
    "weights of others": (
        "uses a tensor that requires a gradient and is neither its parameter nor its input",
        lambda s, h: h * s.scale * OTHER,
    ),
    "far roll": ("may mix distant tokens in roll", lambda s, h: s.scale * h.roll(64, 1)),
    "random": ("draws random numbers from Python or NumPy", lambda s, h: s.scale * h + random.randint(1, 1)),
    "norm of the gradient": ("mixes tokens in its backward", lambda s, h: Normalised.apply(h) * s.scale),
    "pooled": ("returns a tensor with another number of tokens than its input", lambda s, h: (s.scale * h).mean(1)),
    "other object": ("returns something other than one floating-point tensor", lambda s, h: (s.scale * h, "text")),
}


def make_function(function: Callable[..., Any], *parts: Callable[[], nn.Module]) -> nn.Module:
    return Function(function, *(make() for make in parts))


SEES_TILES = "has a hook on parts.0 (of FSDP2, or yours), which would see tiles"
MIXING = {
    **{name: (partial(make_function, *made), reason) for name, (reason, *made) in FUNCTIONS.items()},
    "positions": (Positions, READS),
    "a buffer that is written past its counter": (
        lambda: with_buffer(Function(lambda s, h: s.count.data.add_(1)[0] * 0 + h * s.scale)),
        "stores something of its call in '_buffers'",
    ),
    "hook of gradients": (
        lambda: with_hook(Function(lambda s, h: s.parts[0](h), nn.Linear(WIDTH, WIDTH)), "register_full_backward_hook"),
        SEES_TILES,
    ),
    "hook": (lambda: with_hook(Function(over_tokens, nn.Conv1d(WIDTH, WIDTH, 1))), SEES_TILES),
}


def with_hook(module: nn.Module, register: str = "register_forward_hook") -> nn.Module:
    getattr(module.parts[0], register)(lambda *unused: None)
    return module


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_left_alone_and_runs_as_it_did(name):
    make, reason = MIXING[name]
    torch.manual_seed(0)
    net, hidden = nn.ModuleList([make()]), torch.randn(2, 64, WIDTH)
    state, drawn = {key: value.clone() for key, value in net.state_dict().items()}, torch.get_rng_state()
    plain = net[0](hidden.clone())
    net.load_state_dict(state)
    for attribute in ("aside", "losses", "seen"):
        vars(net[0]).pop(attribute, None)
    torch.set_rng_state(drawn)
    handle = apply_token_tiling(net, tile=16)
    found = net[0](hidden.clone())
    assert handle.verdicts()["0"] == (False, reason)
    if isinstance(found, Tensor):
        assert torch.equal(found, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_input_and_weights_are_those_of_whole_sequences(dtype):
    torch.manual_seed(0)
    net = nn.ModuleList([Function(lambda s, h, *, scale: (s.parts[0](h) * scale).relu().sum(-1), nn.Linear(WIDTH, 4))])
    net.to(dtype)
    hidden = torch.randn(2, 70, WIDTH, dtype=dtype, requires_grad=True)

    def step() -> list[Tensor]:
        result = net[0](hidden=hidden, scale=2.0)
        loss = result.float().square().sum()
        return [result.detach(), *torch.autograd.grad(loss, [hidden, *net[0].parts.parameters()])]

    plain = step()
    handle = apply_token_tiling(net, tile=16)
    found = step()
    assert handle.verdicts()["0"][0]
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).double().norm() <= (1e-5 if dtype is torch.float32 else 1e-2) * other.double().norm()
    handle.remove()
    assert type(net[0]) is Function


def test_modules_of_several_tensors_run_plain_or_are_refused_if_named():
    net = nn.ModuleList([Function(lambda s, h, mask: s.scale * h * mask)])
    arguments = torch.randn(2, 64, WIDTH), torch.ones(2, 64, 1)
    handle = apply_token_tiling(net, tile=16)
    assert torch.equal(net[0](*arguments), arguments[0])
    assert handle.verdicts() == {}
    handle.remove()
    apply_token_tiling(net, "Function", tile=16, error=ValueError)
    with pytest.raises(
        ValueError,
        match=r"^TokenTiling\(layers\): 0 cannot be tiled: it does not get one floating-point tensor of tokens\. "
        r"Leave it out, or use layers='auto'\.$",
    ):
        net[0](*arguments)


def test_dropout_draws_in_the_backward_what_it_drew():
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Sequential(nn.Dropout(0.5), nn.Flatten(2), nn.Linear(WIDTH, WIDTH, bias=False))])
    nn.init.eye_(net[0][2].weight)
    handle, hidden = apply_token_tiling(net, tile=16), torch.ones(2, 70, WIDTH, requires_grad=True)
    result = net[0](hidden)
    torch.rand(3)
    now = torch.get_rng_state()
    result.sum().backward()
    assert handle.verdicts()["0"] == (True, "exact")
    assert torch.equal(hidden.grad, result)
    assert torch.equal(torch.get_rng_state(), now)
    assert 0.4 < (result == 0).float().mean() < 0.6


def test_without_gradients_and_frozen_weights():
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))])
    hidden = torch.randn(2, 64, WIDTH)
    plain = net[0](hidden)
    apply_token_tiling(net, tile=16)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(net[0](hidden), plain, rtol=1e-6, atol=1e-6)
    net.requires_grad_(requires_grad=False)
    assert not net[0](hidden).requires_grad
    assert net[0](hidden.requires_grad_()).requires_grad


def test_without_values_random_numbers_tell():
    with torch.device("meta"):
        others = MIXING.keys() - {"weights of others", "one mask"}  # which are on the host
        nets = nn.ModuleDict({name: MIXING[name][0]() for name in MIXING if name in others})
        nets["alone"] = nn.Sequential(
            nn.RMSNorm(WIDTH), Gain(), nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(), nn.Linear(32, 32), nn.Softmax(-1)
        )
        nets["a tensor that is no buffer"] = nn.Sequential(nn.Linear(WIDTH, WIDTH), Gain(is_buffer=False))
    drawn = torch.get_rng_state()
    handle = apply_token_tiling(nets, list(nets), tile=16)
    for net in nets.values():
        net(torch.empty(2, 64, WIDTH, device="meta"))
    assert [name for name, (is_alone, _) in handle.verdicts().items() if is_alone] == ["alone"]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert {parameter.device.type for parameter in nets.parameters()} == {"meta"}


def test_weights_too_large_for_random_numbers_run_plain_without_values_also_if_named(monkeypatch):
    monkeypatch.setattr(apply, "_MOST_RANDOM_NUMBERS", WIDTH * 16 - 1)
    monkeypatch.setattr(apply, "_in_estimates", {})
    with torch.device("meta"):
        nets = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU())])
    handle = apply_token_tiling(nets, "Sequential", tile=16, error=AssertionError)
    nets[0](torch.empty(2, 64, WIDTH, device="meta"))
    assert handle.verdicts() == {"0": (False, "")}


def test_another_mode_is_proven_for_itself():
    torch.manual_seed(0)
    net = nn.ModuleList([Function(lambda s, h, *, mix: s.scale * (h.cumsum(1) if mix else h))])
    hidden = torch.randn(2, 64, WIDTH)
    handle = apply_token_tiling(net, tile=16)
    for mix in (False, True):
        assert torch.equal(net[0](hidden, mix=mix), hidden.cumsum(1) if mix else hidden)
    assert handle.verdicts()["0"] == (False, READS)


def test_gradients_of_gradients_are_refused():
    net = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))])
    hidden = torch.randn(2, 64, WIDTH, requires_grad=True)
    apply_token_tiling(net, tile=16)
    with pytest.raises(
        RuntimeError,
        match=r"^TokenTiling does not support gradients of gradients \(create_graph=True\)\. Leave it out\.$",
    ):
        torch.autograd.grad(net[0](hidden).sum(), hidden, create_graph=True)


def test_random_numbers_go_on_from_where_they_were():
    net = nn.ModuleList([MIXING["random"][0]()])
    random.seed(0)
    first = random.randint(0, 1000)
    random.seed(0)
    net[0].function = lambda s, h: s.scale * h + random.randint(0, 1000)
    apply_token_tiling(net, tile=16)
    assert torch.equal(net[0](torch.zeros(2, 64, WIDTH)), torch.full((2, 64, WIDTH), float(first)))


def switched() -> tuple[nn.ModuleList, Tensor]:
    """A module with a switch, which lets it mix tokens."""
    torch.manual_seed(0)
    net = nn.ModuleList([Function(lambda s, h: s.scale * (h.cumsum(1) if s.mode == "mix" else h))])
    net[0].mode = "alone"
    return net, torch.randn(2, 64, WIDTH)


def test_a_switch_in_an_attribute_is_proven_for_itself():
    net, hidden = switched()
    handle = apply_token_tiling(net, tile=16)
    for mode, expected in (("alone", hidden), ("mix", hidden.cumsum(1)), ("alone", hidden)):
        net[0].mode = mode
        assert torch.equal(net[0](hidden), expected)
    assert len(vars(net[0])["_token_tiling"].verdicts) == 2
    handle.remove()


def test_a_module_whose_settings_change_in_each_call_runs_plain_at_last():
    net, hidden = switched()
    apply_token_tiling(net, tile=16)
    for step in range(40):
        net[0].step = step
        net[0].mode = "mix" if step == 39 else "alone"
        assert torch.equal(net[0](hidden), hidden.cumsum(1) if step == 39 else hidden)
    assert len(vars(net[0])["_token_tiling"].verdicts) == 32
