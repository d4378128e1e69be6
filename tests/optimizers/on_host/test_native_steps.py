"""Steps of AdamW on moments as they are kept: the bits of those that widen them, and who does not get them."""

from functools import partial
from typing import Any

import pytest
import torch
from support.compiled_codecs import coded_in_c, compiled, needs_compiler
from torch import Tensor, nn
from torch.optim import Adam, AdamW, NAdam

from lightning_vram.core.host.memory import SplitWeights
from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.core.tensors.native_codecs import AdamWStep
from lightning_vram.optimizers.moment_forms import FORMS, LowPrecisionStates
from lightning_vram.optimizers.step_loop import step_in_parts
from lightning_vram.optimizers.step_round import StepRound

pytestmark = needs_compiler
FUSED = partial(AdamW, lr=1e-2, fused=True)


@pytest.fixture(autouse=True)
def _has_step():
    if not compiled().has_step:
        pytest.skip("torch's kernel rounds otherwise on this processor")


def train(form: str, make: Any, change: Any = None) -> list[Tensor]:
    """Step two layers with moments in a form; return weights and moments."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(320, 1), nn.Linear(7, 130))
    optimizer = make(layers.parameters())
    found = FORMS.get(form)
    states = LowPrecisionStates(optimizer, lambda parameter: True, found)
    generator = torch.Generator().manual_seed(1)
    for number in range(4):
        for parameter in layers.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * 10.0**-number
        if change is not None:
            change(optimizer)
        step_round = StepRound(optimizer, is_on_host=False)
        step_in_parts(step_round, states, step_round.take_rest())
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return [*layers.parameters(), *(one.decode() if isinstance(one, LowBitTensor) else one for one in kept)]


def is_same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def follow_schedules(optimizer: AdamW) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]) * 0.7)
        group["betas"] = group["betas"][0] * 0.9, 0.99


@pytest.mark.parametrize("form", ["bf16", "8bit", "4bit"])
@pytest.mark.parametrize(
    ("make", "change"),
    [
        (FUSED, follow_schedules),
        (partial(Adam, fused=True), None),
        (partial(FUSED, betas=(0.8, 0.95), weight_decay=0), None),
    ],
)
def test_a_step_on_what_is_kept_has_the_bits_of_one_that_widens_it(form, make, change):
    theirs = train(form, make, change=change)
    with coded_in_c() as stepped:
        assert is_same(train(form, make, change=change), theirs)
    # The first step makes the moments. The last of 910, 1 and 130 are left to torch's kernel: it rounds them otherwise.
    assert stepped == [320, 896, 128] * 3


@pytest.mark.parametrize("bits", [0x8000, 0x7FFF])  # half a step above what travels: all are odd, and none is
def test_split_weights_step_as_joined_ones_do(bits):
    count = 2**19  # one part, of which some weights become odd in the step
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(count, generator=generator)
    numbers[5:9] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    patterns = numbers.view(torch.int32)
    patterns[64:96] = patterns[64:96].bitwise_right_shift(17).bitwise_left_shift(17).bitwise_or(bits)
    gradient = torch.randn(count, generator=generator).bfloat16()
    gradient[64:80] = 0  # these stay what they are
    gradient[-5] = torch.nan
    state = {"exp_avg": torch.zeros(count), "exp_avg_sq": torch.ones(count)}
    step, split = AdamWStep(3, 1e-2, (0.9, 0.99), 1e-8, 0.0), SplitWeights([count], pin_memory=False)
    split.write_all(numbers)
    upper, lower, odd = split.pieces((0, count))
    moments = {key: value.clone() for key, value in state.items()}
    tensors = upper, lower, gradient, *moments.values()
    split.note_odd((0, count), *compiled().step_split(step, tensors, 32, factor=0.5, odd=odd))
    joined = numbers.clone()
    tensors = joined, gradient.float() * 0.5, *state.values()
    compiled().step_adamw(step, tensors, 32)
    expected = SplitWeights([count], pin_memory=False)
    expected.write_all(joined)
    for key in state:
        assert torch.equal(moments[key].view(torch.int32), state[key].view(torch.int32))
    for ours, theirs in zip((split.read_all(), split.upper), (joined, expected.upper), strict=True):
        kind = torch.int32 if ours.dtype == torch.float32 else torch.int16
        assert torch.equal(ours.view(kind), theirs.view(kind))
    assert split.nbytes == expected.nbytes


def scale_gradients(optimizer: Any) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (partial(AdamW, fused=False), None),
        (partial(FUSED, amsgrad=True), None),
        (partial(FUSED, maximize=True), None),
        (partial(FUSED, betas=(0.4, 0.999)), None),
        (partial(Adam, fused=True, weight_decay=0.1), None),
        (NAdam, None),
        (FUSED, scale_gradients),
    ],
)
def test_other_steps_widen_moments(make, change):
    theirs = train("bf16", make, change=change)
    with coded_in_c() as stepped:
        assert is_same(train("bf16", make, change=change), theirs)
    assert not stepped
