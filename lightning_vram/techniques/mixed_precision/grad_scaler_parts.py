"""What ``GradScaler`` does for a whole optimizer or not at all, for some of its parameters."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.private_names.torch.autocast import (
    device_of,
    no_optimizer_states,
    optimizer_states,
    scale_of,
    set_optimizer_states,
    set_scale,
)

InfChecks = dict[int, Tensor]
"""What ``GradScaler`` found in some gradients, one per device and each > 0 where there is an inf or nan; by id."""


def unscale_part(scaler: GradScaler, optimizer: Optimizer, parameters: list[Tensor]) -> InfChecks:
    """Unscale the gradients of some ``parameters`` only; as if it were all of ``optimizer``."""
    checks: InfChecks = {}
    for alike in _by_layout(parameters):
        part = cast(Optimizer, SimpleNamespace(param_groups=[{"params": alike}]))
        try:
            with _scale_on(alike[0].device, scaler):
                type(scaler).unscale_(scaler, part)  # past what stands in for it
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
    """Let ``scaler`` work where gradients are.

    By itself it copies what it needs to the host without waiting, and uses at once what may not have arrived.
    """
    scale = scale_of(scaler)
    set_scale(scaler, None if scale is None else scale.to(device))  # waits, where it goes to the host
    try:
        yield
    finally:
        set_scale(scaler, scale)


def _by_layout(parameters: list[Tensor]) -> Iterable[list[Tensor]]:
    """Part those on different devices, and those that are sharded in different ways: GradScaler goes by the first."""
    parts: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        layout = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        parts[parameter.device, layout].append(parameter)
    return parts.values()


def note_unscaled(scaler: GradScaler, optimizer: Optimizer, checks: Iterable[Tensor]) -> None:
    """Let ``scaler`` know that all gradients of ``optimizer`` were unscaled, and what was found in them."""
    found_inf: dict[torch.device, Tensor] = {}
    for check in checks:
        so_far = found_inf.get(check.device)
        # One at most, not a sum: fused kernels count back their steps by it.
        found_inf[check.device] = check if so_far is None else torch.maximum(so_far, check)
    optimizer_states(scaler)[id(optimizer)].update(stage=OptState.UNSCALED, found_inf_per_device=found_inf)


def update_scale(scaler: GradScaler, *, overflowed: bool) -> None:
    """Update the scale by what all optimizers found; those with a step to come are still unscaled afterwards."""
    found_inf = torch.full((), float(overflowed), dtype=torch.float32, device=device_of(scaler))
    states, alone = optimizer_states(scaler), no_optimizer_states()
    set_optimizer_states(scaler, alone)
    alone[id(scaler)]["found_inf_per_device"] = {found_inf.device: found_inf}
    try:
        type(scaler).update(scaler)
    finally:
        set_optimizer_states(scaler, states)


def without_optimizers(scaler: GradScaler) -> GradScaler:
    """Return one with the same scale that can be pickled: ``scaler`` itself, if that is so."""
    own = {name: value for name, value in vars(scaler).items() if not isinstance(value, Shadow)}
    if not scaler.is_enabled() or (not optimizer_states(scaler) and len(own) == len(vars(scaler))):
        return scaler
    copy = object.__new__(type(scaler))
    vars(copy).update(own)
    set_optimizer_states(copy, no_optimizer_states())
    return copy
