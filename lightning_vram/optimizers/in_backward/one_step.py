"""One step of an optimizer, parameter by parameter."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_vram.core.gradients.clipping import (
    apply_clip_factor,
    clip_factor,
    clip_sharded_values,
    join_norms,
    norm_part,
)
from lightning_vram.core.tensors.shards import is_shard
from lightning_vram.optimizers.stepping.step_round import StepRound
from lightning_vram.optimizers.stepping.steppable import iterate_parameters, make_twin, plain_step
from lightning_vram.optimizers.stepping.take_over import MembersStep
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part
from lightning_vram.techniques.mixed_precision import note_unscaled, unscale_part


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped before a step; ``None``: not."""

    value: float | None = None  # largest element
    norm: float | None = None  # largest common 2-norm
    by_previous: bool = False  # by the norm of the previous step: that of this step takes a backward of its own


class OneStep:
    """Steps a parameter, and frees its gradient. Settings are read at the first gradient.

    ``is_early``: it happens in the backward; otherwise gradients are clipped before. With ``scaler``, an earlier
    backward finds out whether there is a step at all.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        clipping: Clipping,
        *,
        is_early: bool,
        previous_norm: Tensor | None,
        members_step: MembersStep | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.is_early = is_early
        self.is_measuring = False  # in the backward before the one with the steps
        self.has_measured = False
        self.scaler = scaler
        self._clipping = clipping
        self._members_step = members_step
        self._norm = previous_norm  # to clip by
        self._norms: dict[nn.Parameter, Tensor | None] = {}  # of gradients so far
        self._checks: list[Tensor] = []  # of the scaler, for gradients so far
        self._factor: Tensor | None = None
        self._portions: _Portions | None = None

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> bool:
        """Use the gradient of ``parameter``; ``False`` if it is the second one."""
        if self.scaler is not None and self.is_early:
            self._checks += unscale_part(self.scaler, self.optimizer, [parameter]).values()
        is_first = self._measure(parameter) if self.is_measuring else self._run(parameter)
        parameter.grad = None
        return is_first

    def has_run(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` was stepped."""
        return self._portions is not None and not self._portions.holds(parameter)

    @property
    def has_to_measure(self) -> bool:
        """Whether all gradients must be known before the first step."""
        needs_norm = self._clipping.norm is not None and self._norm is None
        return self.is_early and not self.has_measured and (needs_norm or self.scaler is not None)

    def end_measuring(self) -> None:
        """Step from now on, clipped by the norm so far, and report overflows to the scaler."""
        self._norm = self.norm()
        if self.scaler is not None:
            note_unscaled(self.scaler, self.optimizer, self._checks)
        self._norms, self._checks = {}, []
        self.is_measuring, self.has_measured = False, True

    def norm(self) -> Tensor | None:
        """Return the common norm of all gradients so far, unclipped; ``None`` without any."""
        found = (self._norms.get(one) for one in iterate_parameters(self.optimizer))
        norms = [norm for norm in found if norm is not None]
        return join_norms(norms) if norms else None

    def _measure(self, parameter: nn.Parameter) -> bool:
        assert parameter.grad is not None
        is_first = parameter not in self._norms
        self._norms[parameter] = None if self._clipping.norm is None else norm_part(parameter.grad)
        return is_first

    def _run(self, parameter: nn.Parameter) -> bool:
        if self._portions is None:
            self._portions = _Portions(self.optimizer, self._members_step)
            if self.is_early and self._clipping.norm is not None and self._norm is not None:
                self._factor = clip_factor(self._norm, self._clipping.norm)
        if not self._portions.holds(parameter):
            return False
        if self.is_early and self._clipping.by_previous and self._clipping.norm is not None:
            self._measure(parameter)
        if self.is_early and self._clipping.value is not None:
            clip_sharded_values([parameter], self._clipping.value)
        if self._factor is not None:
            apply_clip_factor([local_part(parameter.grad)], self._factor)
        self._portions.step(parameter)
        return True


class _Portions:
    """A step of an optimizer with its settings now, one parameter at a time."""

    def __init__(self, optimizer: Optimizer, members_step: MembersStep | None) -> None:
        self._optimizer = optimizer
        self._members_step = members_step
        self._step = plain_step(type(optimizer))
        # Proxies for each parameter, as in StepRound, would double the time in the interpreter.
        self._groups = [{**group} for group in optimizer.param_groups]
        self._twin = make_twin(type(optimizer), vars(optimizer), [], optimizer.state)
        self._places = {one: place for place, group in enumerate(self._groups) for one in group["params"]}
        self._round: StepRound | None = None  # for shards, and other step functions

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` was not stepped yet."""
        return parameter in self._places

    def step(self, parameter: nn.Parameter) -> None:
        group = self._groups[self._places.pop(parameter)]
        if self._members_step is not None or is_shard(parameter):
            self._round = self._round or StepRound(self._optimizer, is_on_host=False)
            members = self._round.take([parameter])
            if self._members_step is not None:
                self._members_step(self._optimizer, self._round, members)
            else:
                self._round.run(members)
            return
        group["params"] = [parameter]
        self._twin.param_groups = [group]
        self._step(self._twin)
