"""Lean parameters: what a step does to them, and what becomes of them."""

import re

import pytest
import torch
from support.lean_nets import EXACT, assert_same_weights, give_gradients, lean_net, make_net, take_steps
from torch import nn, optim

from lightning_vram.optimizers.bf16_weights import SCHEMES, LeanParameters


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """The two weights and the two biases together each fill more than one."""
    monkeypatch.setattr("lightning_vram.optimizers.bf16_weights.CHUNK_ELEMENTS", 400)


# Five steps of all others are in optimizer_table.txt.
CASES = [
    (optim.Adam, {"amsgrad": True}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),  # 0.1 is no bf16 number
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.AdamW, {"fused": True}),
]


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_twenty_steps_are_those_of_fp32_to_the_bit(scheme, kind, options):
    net, plain = make_net(), make_net()
    lean = LeanParameters(net.parameters(), scheme)
    optimizer = kind(net.parameters(), lr=0.01, **options)
    lean.attach([optimizer])
    reference = kind(plain.parameters(), lr=0.01, **options)
    for seed in range(20):
        take_steps(net, optimizer, seed)
        take_steps(plain, reference, seed)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
    lean.restore()
    assert_same_weights(net, plain)
    states = zip(optimizer.state.values(), reference.state.values(), strict=True)
    for state, expected in states:
        assert state.keys() == expected.keys()
        assert all(torch.equal(torch.as_tensor(state[key]), torch.as_tensor(expected[key])) for key in state)
    take_steps(net, optimizer, 20)  # as before attaching
    take_steps(plain, reference, 20)
    assert_same_weights(net, plain)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_stay_the_same_objects_and_come_back(scheme):
    net, plain = make_net(), make_net()
    before = list(net.parameters())
    lean = LeanParameters(net.parameters(), scheme)
    assert all(one is other for one, other in zip(net.parameters(), before, strict=True))
    assert all(p.dtype is torch.bfloat16 and p.requires_grad for p in net.parameters())
    lean.restore()
    lean.restore()
    for parameter, original in zip(net.parameters(), plain.parameters(), strict=True):
        kept = 2**-16 if scheme == "bf16+kahan" else 2**-8  # half a unit of 16 or of 8 bits
        error = (parameter - original).abs() / original.abs()
        assert (error == 0).all() if scheme in EXACT else (error <= kept).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_frozen_parameters_come_back_exactly_and_train_when_thawed(scheme):
    net, plain = make_net(), make_net()
    net[0].requires_grad_(False)
    lean = LeanParameters(net.parameters(), scheme)
    assert net[0].weight.dtype is torch.bfloat16
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    lean.attach([optimizer])
    take_steps(net, optimizer, 0)
    full = lean.full_state(net.state_dict())
    assert torch.equal(full["0.weight"], plain[0].weight)  # in every scheme
    net[0].requires_grad_(True)
    give_gradients(net, 1)
    optimizer.step()
    assert {chunk.scheme for chunk in lean._chunks} == {scheme}
    lean.restore()
    expected = torch.add(plain[0].weight, net[0].weight.grad, alpha=-0.1)
    assert torch.allclose(net[0].weight, expected, rtol=2**-7, atol=2**-10)
    if scheme in EXACT:
        assert torch.equal(net[0].weight, expected)


def test_master_shows_halves_of_frozen_and_lent_weights_as_a_conversion_does():
    bits = torch.arange(0x3F80, 0x3FC0, dtype=torch.int32).bitwise_left_shift(16).bitwise_or(0x8000)
    layer = nn.Linear(64, 1, bias=False).requires_grad_(requires_grad=False)
    halves = bits.view(torch.float32).view(1, 64)
    layer.weight.copy_(halves)
    lean = LeanParameters(layer.parameters(), "bf16+master")
    assert torch.equal(layer.weight, halves.bfloat16())
    lean.take({layer.weight: torch.ones(1, 64)})
    take_back = lean.lend({layer.weight: halves})
    assert torch.equal(layer.weight, halves.bfloat16())
    take_back()
    assert torch.equal(layer.weight, torch.ones(1, 64).bfloat16())
    lean.take({layer.weight: halves})
    lean.restore()
    assert torch.equal(layer.weight, halves)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_writes_to_no_parameter_of_another_optimizer(scheme, monkeypatch):
    monkeypatch.setattr("lightning_vram.optimizers.bf16_weights.CHUNK_ELEMENTS", 2**22)
    net = make_net()
    lean = LeanParameters(net.parameters(), scheme)
    optimizers = [optim.SGD(net[0].parameters(), lr=0.1), optim.SGD(net[1].parameters(), lr=0.1)]
    lean.attach(optimizers)
    assert len(lean._chunks) == 1
    give_gradients(net, 0)
    versions = [parameter._version for parameter in net[1].parameters()]
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizers[0].step()
    assert [parameter._version for parameter in net[1].parameters()] == versions
    assert [torch.equal(*pair) for pair in zip(net.parameters(), before, strict=True)] == [False] * 2 + [True] * 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_written_between_steps_is_kept(scheme):
    net, lean, optimizer = lean_net(scheme, lambda parameters: optim.SGD(parameters, lr=0.0))
    take_steps(net, optimizer, 0)
    with torch.no_grad():
        net[0].weight.data.fill_(0.3)  # not even the version counter tells
        net[1].weight[0, 0] = float("nan")
    written = net[1].weight.detach().clone()
    take_steps(net, optimizer, 1)
    # Split and Kahan keep their rest: half a unit of bf16 at most.
    assert torch.allclose(net[0].weight.float(), torch.tensor(0.3), rtol=2**-7)
    assert torch.allclose(net[1].weight, written, rtol=2**-7, equal_nan=True)
    assert torch.equal(net[1].weight.isnan(), written.isnan())
    with torch.no_grad():
        net[1].weight[0, 0] = 1.0  # a NaN can be overwritten, too
    take_steps(net, optimizer, 2)
    assert net[1].weight[0, 0] == 1.0
    lean.restore()
    assert net[1].weight.isfinite().all()


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_and_infinities_written_between_steps_stay_what_they_are(scheme, is_frozen):
    net, lean, optimizer = lean_net(scheme, lambda parameters: optim.SGD(parameters, lr=0.0))
    if is_frozen:
        net[0].requires_grad_(False)
    take_steps(net, optimizer, 0)
    mask = net[0].weight.detach().abs() <= net[0].weight.abs().float().median()
    with torch.no_grad():
        net[0].weight.masked_fill_(mask, 0)  # as pruning does
        nn.init.zeros_(net[0].bias)
        net[1].weight.fill_(torch.inf)
        net[1].bias.copy_(net[1].bias * 2.0**-80)  # what was kept for them is much larger now
    tiny = net[1].bias.detach().float()
    full = lean.full_state(net.state_dict())
    take_steps(net, optimizer, 1)
    lean.restore()
    for state in (full, net.state_dict()):
        assert torch.equal(state["0.weight"] == 0, mask)
        assert not state["0.bias"].any()
        assert (state["1.weight"] >= (3.39e38 if scheme == "bf16+split" else torch.inf)).all()  # infinite in bf16
        assert torch.allclose(state["1.bias"], tiny, rtol=2**-8, atol=0.0)


def test_a_shared_parameter_is_converted_once():
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    before = one.weight.detach().clone()
    lean = LeanParameters([one.weight, other.weight], "bf16+split")
    assert [chunk.parameters for chunk in lean._chunks] == [(one.weight,)]
    full = lean.full_state({"one": one.weight, "other": other.weight.detach(), "bias": one.bias})
    assert full["one"] is full["other"]
    assert full["bias"] is one.bias
    lean.restore()
    assert one.weight is other.weight
    assert torch.equal(one.weight, before)
    assert torch.equal(full["one"], before)


def test_the_full_state_keeps_what_is_not_ours():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    lean = LeanParameters(net[0].parameters(), "bf16+split")
    state = net.state_dict() | {"foreign": torch.zeros(16, dtype=torch.bfloat16), "text": "kept"}
    assert lean.full_state(net.state_dict())._metadata == net.state_dict()._metadata
    full = lean.full_state(state)
    assert list(full) == list(state)
    assert {key for key in state if full[key] is not state[key]} == {"0.weight", "0.bias"}
    assert full["0.weight"].dtype is torch.float32
    assert full["0.weight"].untyped_storage().nbytes() == 64  # alone in its memory: files hold whole storages
    assert state["0.weight"].dtype is torch.bfloat16


def test_strides_empty_and_single_parameters_come_back():
    parameters = [nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))]
    parameters += [nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(0.7))]
    copies = [parameter.detach().clone() for parameter in parameters]
    lean = LeanParameters(parameters, "bf16+kahan")
    optimizer = optim.AdamW(parameters, lr=0.0)
    lean.attach([optimizer])
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {value.dtype for value in optimizer.state[parameters[2]].values()} == {torch.float32}  # steps among them
    assert parameters[0].is_contiguous(memory_format=torch.channels_last)
    lean.restore()
    for parameter, original in zip(parameters, copies, strict=True):
        assert parameter.stride() == original.stride()
        assert torch.allclose(parameter, original, rtol=2**-16)


def test_a_module_that_was_converted_meanwhile_is_refused():
    net, lean, optimizer = lean_net("bf16+split")
    net[0].weight.data = net[0].weight.data.float()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    message = (
        "A parameter of shape (17, 33) is torch.float32 and no longer torch.bfloat16: do not convert the module "
        "during the fit."
    )
    for use in (optimizer.step, lambda: lean.take({net[0].weight: torch.ones(17, 33)})):
        with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
            use()


def test_chunks_draw_different_numbers():
    twins = [nn.Parameter(torch.ones(400)) for _ in range(2)]
    lean = LeanParameters(twins, "bf16+stochastic")
    optimizer = optim.SGD(twins, lr=2**-10)  # a quarter of a unit below one
    lean.attach([optimizer])
    for twin in twins:
        twin.grad = torch.ones_like(twin)
    optimizer.step()
    assert not torch.equal(*twins)
    assert all(set(twin.tolist()) == {1.0, 1.0 - 2**-8} for twin in twins)


def test_parameters_that_share_memory_are_refused_and_those_side_by_side_are_not():
    memory = torch.zeros(12)
    tied = [nn.Parameter(memory[:6].view(2, 3)), nn.Parameter(memory[4:8])]
    message = (
        "Two parameters of shapes (2, 3) and (4,) that share memory cannot be stored in bfloat16: each would get its "
        "own. Tie them as one parameter (head.weight = embedding.weight), not by their data."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LeanParameters(tied, "bf16+split")
    assert {parameter.dtype for parameter in tied} == {torch.float32}
    beside = [nn.Parameter(memory[6:]), nn.Parameter(memory[:6]), nn.Parameter(memory.view(6, 2)[:, 0])]
    LeanParameters(beside, "bf16+split")
    assert {parameter.dtype for parameter in beside} == {torch.bfloat16}


def test_copies_under_the_name_of_a_parameter_become_full_and_others_do_not():
    net, plain = make_net(), make_net()
    net[1].weight.data[0, 0] = plain[1].weight.data[0, 0] = torch.nan
    names = {**dict(net.named_parameters()), "tied": net[0].weight}
    lean = LeanParameters(net.parameters(), "bf16+split", names)
    state = {name: value.detach().clone() for name, value in names.items()}
    average = state["0.bias"] = state["0.bias"] * 2
    state["1.bias"] = state["1.bias"].repeat(2)
    full = lean.full_state(state)
    assert torch.equal(full["0.weight"], plain[0].weight)
    assert torch.equal(full["tied"], plain[0].weight)
    assert torch.equal(full["1.weight"].nan_to_num(7.0), plain[1].weight.nan_to_num(7.0))
    assert full["0.bias"] is average
    assert full["1.bias"] is state["1.bias"]


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_exact_weights_are_taken(scheme, is_frozen):
    net, other = make_net(), nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 5))
    net.requires_grad_(not is_frozen)
    lean = LeanParameters(net.parameters(), scheme)
    before = lean.full_state(net.state_dict())
    lean.take({net[0].weight: other[0].weight, net[1].bias: other[1].bias.double()})
    taken, expected = lean.full_state(net.state_dict()), {**before, "0.weight": other[0].weight}
    expected["1.bias"] = other[1].bias
    kept = {"bf16+kahan": 2**-16, "bf16+stochastic": 2**-8}.get(scheme, 0.0) * (not is_frozen)
    for name, value in expected.items():
        assert torch.allclose(taken[name], value, rtol=kept, atol=0.0), name
        assert torch.equal(net.state_dict()[name], taken[name].bfloat16()), name
    for name in ("0.bias", "1.weight"):
        assert torch.equal(taken[name], before[name])
