"""One step of an optimizer that gets its gradients one after the other."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_vram.core.gradients.clipping import clip_factor, clip_sharded_values
from lightning_vram.optimizers.stepping import StepRound, iterate_parameters


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped before they are stepped with.

    Args:
        value: Largest element; ``None``: elements are left alone.
        norm: Largest common 2-norm; ``None``: the norm is left alone.
        by_previous: Whether the norm of the step before counts, in place of that of this step, which takes a backward
            of its own.
    """

    value: float | None = None
    norm: float | None = None
    by_previous: bool = False


class OneStep:
    """Steps a parameter, and frees its gradient.

    Args:
        optimizer: Whose step it is. Its settings count as they are when the first gradient comes.
        clipping: Of this step.
        is_early: Whether it happens in the backward; else somebody else clips first. Also an attribute.
        previous_norm: That of the gradients of the step before.
    """

    def __init__(
        self, optimizer: Optimizer, clipping: Clipping, *, is_early: bool, previous_norm: Tensor | None
    ) -> None:
        self.optimizer = optimizer
        self.is_early = is_early
        self.is_measuring = False  # the norm, in a backward before that in which parameters step
        self._clipping = clipping
        self._norm = previous_norm  # that gradients are clipped by
        self._norms: dict[nn.Parameter, Tensor] = {}  # of gradients that came
        self._round: StepRound | None = None

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> bool:
        """Use the gradient of ``parameter`` for all that it is good for; ``False`` if one of it came before."""
        is_first = self._measure(parameter) if self.is_measuring else self._run(parameter)
        parameter.grad = None
        return is_first

    @property
    def needs_norm(self) -> bool:
        """Whether gradients cannot be clipped before all of them have come."""
        return self.is_early and self._clipping.norm is not None and self._norm is None

    def end_measuring(self) -> None:
        """Step with what comes from now on, clipped by the norm of what came."""
        self._norm = self.norm()
        self._norms = {}
        self.is_measuring = False

    def norm(self) -> Tensor | None:
        """Return the common norm of all gradients that came, before they were clipped; ``None`` without any.

        The norm of norms, in the order of ``torch.nn.utils.get_total_norm``, is that of all gradients to the bit.
        """
        norms = [self._norms[one] for one in iterate_parameters(self.optimizer) if one in self._norms]
        return get_total_norm(norms) if norms else None

    def _measure(self, parameter: nn.Parameter) -> bool:
        assert parameter.grad is not None
        is_first = parameter not in self._norms
        self._norms[parameter] = get_total_norm([parameter.grad])
        return is_first

    def _run(self, parameter: nn.Parameter) -> bool:
        if self._round is None:
            self._round = StepRound(self.optimizer, is_on_host=False)
            if self.is_early and self._clipping.norm is not None and self._norm is not None:
                self._round.factor = clip_factor(self._norm, self._clipping.norm)
        members = self._round.take([parameter])
        if self.is_early and self._clipping.norm is not None and self._clipping.by_previous:
            self._measure(parameter)
        if self.is_early and self._clipping.value is not None:
            clip_sharded_values([parameter], self._clipping.value)
        self._round.run(members)
        return bool(members)
