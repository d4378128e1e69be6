"""Bit-exact steps of torch's fused AdamW on stored weights and moments, in one pass over memory."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from lightning_vram.core.host.split_weights import Part, SplitWeights
from lightning_vram.core.tensors.low_bit import LowBitTensor
from lightning_vram.core.tensors.native_codecs import LANES, AdamWStep, native_codecs
from lightning_vram.optimizers.stepping.state_forms import is_narrow
from lightning_vram.optimizers.stepping.step_round import Member, State, StepRound
from lightning_vram.optimizers.stepping.steppable import steps_like

_STATE = {"step", "exp_avg", "exp_avg_sq"}
_OTHERS = ("amsgrad", "maximize", "differentiable")  # unsupported settings


def read_adamw_step(step_round: StepRound, member: Member) -> AdamWStep | None:
    """Return the step of a member if it is one of fused AdamW on the host, but not the first."""
    optimizer, state = step_round.optimizer, member.local_state
    step = state.get("step")
    if set(state) != _STATE or not isinstance(step, Tensor) or type(step) is not Tensor or step.device.type != "cpu":
        return None
    settings = step_round.settings_of(member.group)
    is_other = not settings.get("fused") or any(settings.get(name) for name in _OTHERS)
    is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    if is_other or is_scaled or not steps_like(type(optimizer), (Adam, AdamW)):
        return None
    numbers = settings["lr"], *settings["betas"], settings["eps"], settings["weight_decay"]
    if any(isinstance(number, Tensor) and number.device.type != "cpu" for number in numbers):
        return None
    lr, first, second, eps, decay = map(float, numbers)
    if 1 - first >= 0.5 or (decay and not settings.get("decoupled_weight_decay")):  # use other formulas
        return None
    return AdamWStep(int(step) + 1, lr, (first, second), eps, decay)


def step_as_kept(step: AdamWStep, weights: Tensor, gradient: Tensor, state: State, draws: tuple[int, int]) -> bool:
    """Step flat fp32 weights with stored moments by compiled code, if there is some; return whether they are stepped.

    ``draws``: random draws for the first place of both moments.
    """
    moments = state["exp_avg"], state["exp_avg_sq"]
    if weights.numel() % LANES or gradient.dtype != torch.float32 or not all(map(is_narrow, moments)):
        return False
    tensors = weights, gradient, *map(_as_it_lies, moments)
    native = native_codecs(*tensors)
    if native is None or not native.has_step:
        return False
    native.step_adamw(step, tensors, _bits_of(moments[0]), draws)
    return True


def step_split(
    step: AdamWStep,
    split: SplitWeights,
    part: Part,
    gradient: tuple[Tensor, float],
    state: State,
    draws: tuple[int, int],
) -> bool:
    """Step a part of split weights likewise; the gradient may be bf16, with a factor."""
    upper, lower, (places, halves) = split.pieces(part)
    moments, (numbers, factor) = (state["exp_avg"], state["exp_avg_sq"]), gradient
    is_known = all(is_narrow(one) or one.dtype == torch.float32 for one in moments) and numbers.dtype in {
        torch.float32,
        torch.bfloat16,
    }
    if places is None or not is_known or upper.numel() % LANES or numbers.numel() != upper.numel():
        return False
    tensors = upper, lower, numbers, *map(_as_it_lies, moments)
    native = native_codecs(*tensors)
    if native is None or not native.has_step:
        return False
    found = native.step_split(step, tensors, _bits_of(moments[0]), draws, factor=factor, odd=(places, halves))
    split.note_odd(part, *found)
    return True


def _as_it_lies(moment: Any) -> Tensor:
    records: Tensor = moment.records if isinstance(moment, LowBitTensor) else moment
    return records


def _bits_of(moment: Any) -> int:
    return int(moment.bits) if isinstance(moment, LowBitTensor) else 8 * int(moment.itemsize)
