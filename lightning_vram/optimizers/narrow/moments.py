"""Moments of Adam and its kin in bfloat16, beside parameters and gradients in float32: 4 bytes per weight, not 8.

A step goes through torch's own kernel: at once where that takes such moments, else over some million weights at a time,
whose moments are float32 for as long, and are rounded at random afterwards. That costs reading and writing the moments
once more, and 12 bytes for each weight of a part.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_vram.optimizers.on_host import NarrowStates, step_in_parts, widen_when_stepped
from lightning_vram.optimizers.stepping import (
    MOMENTS,
    Member,
    State,
    StepRound,
    StepTakeOver,
    find_form,
    has_moments,
    iterate_parameters,
    make_stand_in,
    make_twin,
    plain_step,
    refuse_form,
    widen_state,
)
from lightning_vram.private_names.torch.optimizers import note_step

NAME = "MomentsInBF16"
_TRIED = 16  # numbers
_OF_SCALER = ("grad_scale", "found_inf")  # attributes by which a GradScaler has fused kernels scale gradients


class NarrowMoments(StepTakeOver):
    """Optimizers whose moments are in bfloat16 until :meth:`let_go`. They stay the same objects.

    Optimizers that are made in the midst of training are taken in when they step first.

    Args:
        module: Whose parameters they have.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept: dict[int, NarrowStates] = {}  # by id of the optimizer
        self._takes: dict[tuple[object, ...], bool] = {}
        self._handles: list[RemovableHandle] = []
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Have the moments of optimizers in bfloat16 from now on, those that they have and those that they load.

        Args:
            optimizers: Any. Those without moments of Adam's kind are left alone.

        Raises:
            ValueError: If weights of one are not float32; then none is changed.
        """
        fresh = [one for one in optimizers if has_moments(one) and not self._is_taken(one)]
        for optimizer in fresh:
            refuse_form(NAME, f"leave {NAME} out", optimizer, set(iterate_parameters(optimizer)))
        form = find_form("bf16")
        assert form is not None
        for optimizer in fresh:
            states = NarrowStates(optimizer, _narrowable(optimizer), form)
            states.convert(optimizer)
            self._kept[id(optimizer)] = states
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(states.before_load),
                optimizer.register_load_state_dict_post_hook(partial(_after_load, states)),
            ]
            self._take_over(optimizer)

    def let_go(self) -> None:
        """Let the optimizers step by themselves again: what they have then becomes float32."""
        self.end_standing_in()
        for handle in self._handles:
            handle.remove()
        for optimizer in self._taken:
            widen_when_stepped(optimizer)
        self._taken, self._stand_ins, self._handles, self._kept = [], [], [], {}

    def _has_ours(self, optimizer: Optimizer) -> bool:
        own = set(self._module.parameters())
        return has_moments(optimizer) and any(parameter in own for parameter in iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        note_step(optimizer)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_round, states = StepRound(optimizer, is_on_host=False), self._kept[id(optimizer)]
        members = step_round.take_rest()
        plain: list[Member] = []
        in_parts: list[Member] = []
        for member in members:
            (plain if self._is_for_kernel(member, optimizer) else in_parts).append(member)
        step_round.run(plain)
        step_in_parts(step_round, states, in_parts)
        return loss

    def _is_for_kernel(self, member: Member, optimizer: Optimizer) -> bool:
        """Whether the kernel steps with the states as they are. Moments of a first step are yet to be made."""
        if not member.parameter.dim():
            return True
        if not any(key in member.local_state for key in MOMENTS):
            return False
        key = id(optimizer), member.group, member.shard.device
        if key not in self._takes:
            self._takes[key] = takes_narrow(optimizer, member.group, member.shard.device)
        return self._takes[key]


def takes_narrow(optimizer: Optimizer, group: int, device: torch.device) -> bool:
    """Whether the kernel that steps a group of an optimizer takes moments in bfloat16: it steps a few numbers.

    Args:
        optimizer: Is not changed.
        group: Number of the group.
        device: On which.
    """
    attributes = {key: value for key, value in vars(optimizer).items() if key not in _OF_SCALER}
    settings = optimizer.param_groups[group]

    def step(shard: Tensor, state: State) -> tuple[Tensor, State]:
        stand_in = make_stand_in(shard.clone(), torch.linspace(-1, 1, _TRIED, device=device))
        states = defaultdict(dict, {stand_in: dict(state)})
        kind = type(optimizer)
        with torch.no_grad():
            plain_step(kind)(make_twin(kind, attributes, [{**settings, "params": [stand_in]}], states))
        return stand_in.detach(), states[stand_in]

    weights, state = step(torch.linspace(0, 1, _TRIED, device=device), {})
    narrow = {key: value.bfloat16() if key in MOMENTS else _copy(value) for key, value in state.items()}
    expected, _ = step(weights, widen_state({key: _copy(value) for key, value in narrow.items()}))
    try:
        found, left = step(weights, narrow)
    except (RuntimeError, TypeError):  # what torch raises for dtypes that differ
        return False
    is_narrow = all(left[key].dtype == torch.bfloat16 for key in left if key in MOMENTS)
    return is_narrow and torch.allclose(found, expected, rtol=1e-2, atol=1e-6)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _narrowable(optimizer: Optimizer) -> list[nn.Parameter]:
    """Those that are no scalars."""
    return [parameter for parameter in iterate_parameters(optimizer) if parameter.dim()]


def _after_load(states: NarrowStates, optimizer: Optimizer) -> None:
    states.after_load(optimizer)
    states.convert(optimizer)
