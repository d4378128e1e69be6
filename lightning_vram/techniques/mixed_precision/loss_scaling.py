"""Loss scaling for float16, for any number of optimizers, by a ``torch.amp.GradScaler``.

Unlike with ``GradScaler`` alone, optimizers may share parameters, step several times between two updates of the scale,
or go on accumulating gradients while it changes. Invariant: after :meth:`LossScaling.scale` all gradients are scaled,
by the present scale, and until the next call each is unscaled at most once. A step costs one read of the device, and
another if there are gradients on the host.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.gradients import scale_gradients
from lightning_vram.core.patching import MethodPatch
from lightning_vram.private_names.torch import (
    device_of,
    no_optimizer_states,
    optimizer_states,
    scale_of,
    set_optimizer_states,
    set_scale,
)

InfChecks = dict[int, Tensor]
"""By id: found_inf tensors of ``GradScaler``, one per device, > 0 where there is an inf or nan."""


def unscale_part(scaler: GradScaler, optimizer: Optimizer, parameters: list[Tensor]) -> InfChecks:
    """Unscale the gradients of some ``parameters`` of ``optimizer`` only."""
    checks: InfChecks = {}
    for alike in _by_layout(parameters):
        part = cast(Optimizer, SimpleNamespace(param_groups=[{"params": alike}]))
        try:
            with _scale_on(alike[0].device, scaler):
                type(scaler).unscale_(scaler, part)  # past a MethodPatch
        except ValueError as error:
            if not any(p.grad is not None and p.grad.dtype is torch.float16 for p in alike):
                raise
            raise ValueError(
                f"The gradients of {type(optimizer).__name__} cannot be unscaled, as parameters are float16: keep them "
                "in float32, which autocast casts, or use bfloat16."
            ) from error
        finally:
            state = optimizer_states(scaler).pop(id(part))
        checks.update((id(check), check) for check in state["found_inf_per_device"].values())
    return checks


@contextmanager
def _scale_on(device: torch.device, scaler: GradScaler) -> Iterator[None]:
    """Move the scale to the gradients: GradScaler copies it to the host without waiting, and uses it at once."""
    scale = scale_of(scaler)
    set_scale(scaler, None if scale is None else scale.to(device))  # a D2H copy that waits
    try:
        yield
    finally:
        set_scale(scaler, scale)


def _by_layout(parameters: list[Tensor]) -> Iterable[list[Tensor]]:
    """Group by device and by sharding: GradScaler goes by the first."""
    parts: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        parts[parameter.device, layout].append(parameter)
    return parts.values()


def note_unscaled(scaler: GradScaler, optimizer: Optimizer, checks: Iterable[Tensor]) -> None:
    """Set the state of ``optimizer`` in ``scaler`` to unscaled, with what was found."""
    found_inf: dict[torch.device, Tensor] = {}
    for check in checks:
        so_far = found_inf.get(check.device)
        # The maximum, not a sum: fused kernels subtract it from their step count.
        found_inf[check.device] = check if so_far is None else torch.maximum(so_far, check)
    optimizer_states(scaler)[id(optimizer)].update(stage=OptState.UNSCALED, found_inf_per_device=found_inf)


def update_scale(scaler: GradScaler, *, overflowed: bool) -> None:
    """Update the scale; the states of optimizers that have not stepped yet stay."""
    found_inf = torch.full((), float(overflowed), dtype=torch.float32, device=device_of(scaler))
    states, alone = optimizer_states(scaler), no_optimizer_states()
    set_optimizer_states(scaler, alone)
    alone[id(scaler)]["found_inf_per_device"] = {found_inf.device: found_inf}
    try:
        type(scaler).update(scaler)
    finally:
        set_optimizer_states(scaler, states)


def without_optimizers(scaler: GradScaler) -> GradScaler:
    """Return ``scaler``, or a copy with the same scale if it has state that cannot be pickled."""
    own = {name: value for name, value in vars(scaler).items() if not isinstance(value, MethodPatch)}
    if not scaler.is_enabled() or (not optimizer_states(scaler) and len(own) == len(vars(scaler))):
        return scaler
    copy = object.__new__(type(scaler))
    vars(copy).update(own)
    set_optimizer_states(copy, no_optimizer_states())
    return copy


@dataclass(frozen=True)
class StepResult:
    """How a step went."""

    overflowed: bool  # skipped, as a gradient was inf or nan on this rank or another
    output: Any  # of ``optimizer.step``; ``None`` if skipped


class LossScaling:
    """Use a ``GradScaler`` for one optimizer or several.

    Call :meth:`scale` before each backward, :meth:`unscale` where gradients are read before the step, :meth:`step` in
    place of ``optimizer.step``, and :meth:`update` once after all steps that belong together. A disabled scaler does
    nothing. A copy or pickle has the scale and nothing of the running step.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> scaling = LossScaling(GradScaler("cpu", init_scale=8.0), [optimizer])
        >>> scaling.scale(weight.sum()).backward()
        >>> scaling.step(optimizer)
        StepResult(overflowed=False, output=None)
        >>> scaling.update(), weight.tolist()
        (False, [0.5, 0.5])
    """

    def __init__(self, scaler: GradScaler, optimizers: Iterable[Optimizer] = ()) -> None:
        self.scaler = scaler
        self._checks: WeakKeyDictionary[Optimizer, InfChecks] = WeakKeyDictionary()  # since the optimizer's last step
        self._unscaled: dict[int, InfChecks] = {}  # parameters, by id, whose gradients were unscaled since scale()
        self._overflows: list[bool] = []  # of the steps since the last update
        self.watch(optimizers)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (without_optimizers(self.scaler),)

    @property
    def scale_value(self) -> float:
        """The factor on the loss, 1 if disabled. Reads the device."""
        return self.scaler.get_scale()

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Track only these optimizers, held weakly; others from their first :meth:`unscale` or :meth:`step` on."""
        self._checks = WeakKeyDictionary({optimizer: {} for optimizer in optimizers})
        self._overflows = []
        if self.scaler.is_enabled():
            optimizer_states(self.scaler).clear()

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply ``loss``, of any shape, by the scale, and unscaled gradients too: backward adds to them."""
        if not self.scaler.is_enabled():
            return loss
        self._note_unscaled_elsewhere()
        for optimizer, checks in self._checks.items():
            if checks and all(parameter.grad is None for parameter in _parameters_of(optimizer)):
                checks.clear()  # gradients that were unscaled and dropped without a step
        scaled = set(map(id, self._scaled(self._parameters())))
        unscaled = [parameter for parameter in self._parameters() if id(parameter) not in scaled]
        scaled_loss: Tensor = type(self.scaler).scale(self.scaler, loss)  # past a MethodPatch
        if self._scale is not None:
            scale_gradients(unscaled, self._scale)
        self._unscaled.clear()
        optimizer_states(self.scaler).clear()
        return scaled_loss

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of ``optimizer`` that are scaled, and look for inf and nan."""
        self._checks.setdefault(optimizer, {})
        if self._scale is None:
            return
        self._note_unscaled_elsewhere()
        parameters = _parameters_of(optimizer)
        scaled = self._scaled(parameters)
        if scaled:
            checks = unscale_part(self.scaler, optimizer, scaled)
            self._unscaled.update((id(parameter), checks) for parameter in scaled)
        several = {id(checks): checks for checks in (self._unscaled[id(parameter)] for parameter in parameters)}
        for checks in several.values():  # more than one if it shares parameters
            self._checks[optimizer].update(checks)
        # A call of scaler.unscale_(optimizer) raises rather than unscale again.
        optimizer_states(self.scaler)[id(optimizer)]["stage"] = OptState.UNSCALED

    def step(
        self, optimizer: Optimizer, found_inf_over_ranks: Callable[[Tensor], Tensor] | None = None, **kwargs: Any
    ) -> StepResult:
        """Unscale gradients that are scaled, and call ``optimizer.step`` unless one of them is inf or nan.

        ``found_inf_over_ranks`` reduces a float32 scalar, > 0 where there is an inf or nan, over all ranks, which then
        step or skip together; ``None``: this rank decides alone.
        """
        if kwargs.pop("closure", None) is not None:
            raise ValueError(
                "LossScaling.step(closure) is not possible: run the closure first, then step without it. Optimizers "
                "that call it several times, such as LBFGS, need a run without loss scaling."
            )
        if not self.scaler.is_enabled():
            return StepResult(overflowed=False, output=optimizer.step(**kwargs))
        self.unscale(optimizer)
        found_inf = self._found_inf(optimizer)
        if found_inf_over_ranks is not None:
            found_inf = found_inf_over_ranks(found_inf)
        overflowed = found_inf.item() > 0
        self._overflows.append(overflowed)
        self._checks[optimizer] = {}
        optimizer_states(self.scaler).pop(id(optimizer), None)
        return StepResult(overflowed, output=None if overflowed else optimizer.step(**kwargs))

    def update(self) -> bool:
        """Update the scale if there was a step since the last update; return whether one overflowed.

        Gradients that wait for a later step are rescaled.
        """
        if not self._overflows:
            return False
        overflowed, self._overflows = any(self._overflows), []
        self._note_unscaled_elsewhere()
        if self._scale is None:  # this rank had no loss, others may have had one
            self._unscaled.update((id(parameter), {}) for parameter in self._parameters())
            type(self.scaler).scale(self.scaler, torch.zeros((), device=device_of(self.scaler)))
        with self._rescaling():
            update_scale(self.scaler, overflowed=overflowed)
        return overflowed

    def end(self) -> None:
        """Unscale all gradients: the run goes on without a scale. Gradients that overflowed are dropped."""
        for optimizer in list(self._checks):
            self.unscale(optimizer)
            if self._found_inf(optimizer).item() > 0:
                optimizer.zero_grad()
        self.watch([])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scaler."""
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an enabled scaler. A disabled one loads nothing."""
        with self._rescaling():
            self.scaler.load_state_dict(state_dict)

    @property
    def _scale(self) -> Tensor | None:
        """On its device; ``None`` before the first loss, and if disabled."""
        return scale_of(self.scaler)

    def _parameters(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._checks for parameter in _parameters_of(optimizer))

    def _scaled(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        if self._scale is None:
            return []
        return [parameter for parameter in parameters if id(parameter) not in self._unscaled]

    def _note_unscaled_elsewhere(self) -> None:
        """Note gradients that the user's ``scaler.unscale_`` unscaled."""
        for optimizer in self._checks:
            state = optimizer_states(self.scaler).get(id(optimizer))
            if state is not None and state["found_inf_per_device"]:  # there are none in what unscale() leaves there
                checks = {id(check): check for check in state["found_inf_per_device"].values()}
                for parameter in _parameters_of(optimizer):
                    self._unscaled.setdefault(id(parameter), checks)

    def _found_inf(self, optimizer: Optimizer) -> Tensor:
        device = torch.device(device_of(self.scaler)) if self._scale is None else self._scale.device
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        for check in self._checks[optimizer].values():
            found_inf += check.to(device)  # is read at once, on the host too
        return found_inf

    @contextmanager
    def _rescaling(self) -> Iterator[None]:
        """Rescale the scaled gradients by the change of the scale inside the block."""
        scaled = [parameter for parameter in self._scaled(self._parameters()) if parameter.grad is not None]
        before = self._scale.clone() if self._scale is not None else None
        yield
        if scaled and before is not None and self._scale is not None and not torch.equal(self._scale, before):
            scale_gradients(scaled, self._scale / before)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
