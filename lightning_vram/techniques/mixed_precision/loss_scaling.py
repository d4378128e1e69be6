"""Loss scaling for float16 by a ``torch.amp.GradScaler``, for optimizers that share no parameters.

The stage of an optimizer in the scaler says what its gradients are: scaled by the present scale (ready), or unscaled.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.gradients import scale_gradients
from lightning_vram.private_names.torch import optimizer_states, scale_of, set_scale


def unscale_part(scaler: GradScaler, parameters: list[Tensor]) -> list[Tensor]:
    """Unscale the gradients of some ``parameters`` of an optimizer; return tensors that are > 0 for an inf or nan."""
    checks: list[Tensor] = []
    scale = scale_of(scaler)
    parts: dict[Any, list[Tensor]] = defaultdict(list)  # by device and by sharding: GradScaler goes by the first
    for parameter in parameters:
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        parts[parameter.device, layout].append(parameter)
    for alike in parts.values():
        part = cast(Optimizer, SimpleNamespace(param_groups=[{"params": alike}]))
        # A D2H copy that waits: GradScaler copies it to the host without waiting, and uses it at once.
        set_scale(scaler, None if scale is None else scale.to(alike[0].device))
        try:
            type(scaler).unscale_(scaler, part)  # past a MethodPatch
        finally:
            set_scale(scaler, scale)
            state = optimizer_states(scaler).pop(id(part), {"found_inf_per_device": {}})
        checks += state["found_inf_per_device"].values()
    return checks


def note_unscaled(scaler: GradScaler, optimizer: Optimizer, checks: Iterable[Tensor]) -> None:
    """Set the stage of ``optimizer`` in ``scaler`` to unscaled, with what was found."""
    found_inf = _join(scaler, checks)
    optimizer_states(scaler)[id(optimizer)].update(
        stage=OptState.UNSCALED, found_inf_per_device={found_inf.device: found_inf}
    )


def _join(scaler: GradScaler, checks: Iterable[Tensor]) -> Tensor:
    scale = scale_of(scaler)
    assert scale is not None
    found_inf = torch.zeros_like(scale)
    for check in checks:  # to be read at once, on the host too; no sum: fused kernels subtract it from their step count
        found_inf = torch.maximum(found_inf, check.to(scale.device))
    return found_inf


class LossScaling:
    """Use an enabled ``GradScaler`` for ``optimizers``, which share no parameters.

    Call :meth:`scale` before each backward, :meth:`unscale` where gradients are read before the step, :meth:`step` in
    place of ``optimizer.step``, and :meth:`update` once after all steps that follow a backward. The next :meth:`scale`
    calls it too. Gradients that wait for a later step, such as those of an optimizer that accumulates more batches than
    another, are rescaled with the scale.

    ``over_ranks`` reduces a float32 scalar, > 0 where there is an inf or nan, over all ranks, which then step or skip
    together; ``None``: this rank decides alone. ``on_update`` gets the number of steps that were skipped.
    """

    def __init__(
        self,
        scaler: GradScaler,
        optimizers: Sequence[Optimizer],
        over_ranks: Callable[[Tensor], Tensor] | None = None,
        on_update: Callable[[int], None] = lambda num_overflowed: None,
    ) -> None:
        self.scaler = scaler
        self.num_overflowed = 0  # steps skipped since the last update
        self._optimizers, self._over_ranks, self._on_update = optimizers, over_ranks, on_update
        optimizer_states(scaler).clear()  # of an interrupted run

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply ``loss``, of any shape, by the scale."""
        self.update()
        scaled: Tensor = type(self.scaler).scale(self.scaler, loss)  # past a MethodPatch
        return scaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of ``optimizer`` if they are scaled, and look for inf and nan. A collective."""
        if self._stage(optimizer) is not OptState.READY:
            return
        found_inf = _join(self.scaler, unscale_part(self.scaler, _parameters_of(optimizer)))
        if self._over_ranks is not None:
            found_inf = self._over_ranks(found_inf)
        note_unscaled(self.scaler, optimizer, [found_inf])

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Call ``optimizer.step`` with unscaled gradients; skip it and return ``None`` if one of them is inf or nan."""
        self.unscale(optimizer)
        overflowed = self._has_overflowed(optimizer)
        output = None if overflowed else optimizer.step(**kwargs)
        optimizer_states(self.scaler)[id(optimizer)]["stage"] = OptState.STEPPED
        self.num_overflowed += overflowed
        return output

    def update(self) -> None:
        """Update the scale, if gradients were unscaled since the last update, and rescale those that wait."""
        stages = [state["stage"] for state in optimizer_states(self.scaler).values()]
        if not stages:
            return
        waiting = [(optimizer, self._unscaling_factor(optimizer)) for optimizer in self._waiting()]
        self.scaler.update()  # from now on all are ready
        for optimizer, factor in waiting:
            change = factor * self.scaler.get_scale()
            if change != 1:
                scale_gradients(_parameters_of(optimizer), change)
        num_overflowed, self.num_overflowed = self.num_overflowed, 0
        if OptState.STEPPED in stages:
            self._on_update(num_overflowed)

    def stop(self) -> None:
        """Unscale all gradients: the run goes on without a scale. Gradients that overflowed are dropped."""
        for optimizer in self._waiting():
            self.unscale(optimizer)
            if self._has_overflowed(optimizer):
                optimizer.zero_grad()
        optimizer_states(self.scaler).clear()

    def _stage(self, optimizer: Optimizer) -> OptState:
        state = optimizer_states(self.scaler).get(id(optimizer))
        return OptState.READY if state is None else state["stage"]

    def _has_overflowed(self, optimizer: Optimizer) -> bool:
        checks = optimizer_states(self.scaler)[id(optimizer)]["found_inf_per_device"]
        return any(check.item() > 0 for check in checks.values())

    def _waiting(self) -> list[Optimizer]:
        """List optimizers with gradients that no step has used since the last update."""
        unstepped = (one for one in self._optimizers if self._stage(one) is not OptState.STEPPED)
        return [one for one in unstepped if any(parameter.grad is not None for parameter in _parameters_of(one))]

    def _unscaling_factor(self, optimizer: Optimizer) -> float:
        """Return the factor that unscales gradients before an update; nan if they overflowed: clipping may hide it."""
        if self._stage(optimizer) is OptState.READY:
            return 1 / self.scaler.get_scale()
        return math.nan if self._has_overflowed(optimizer) else 1.0


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
