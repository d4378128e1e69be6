"""Optimizers that step a few parameters at a time, on local shards, in any thread."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.gradients.clipping import apply_clip_factor
from lightning_vram.core.tensors.layout import stored_like
from lightning_vram.optimizers.stepping.steppable import iterate_parameters, make_twin, plain_step
from lightning_vram.private_names.fsdp2.sharded_tensors import DTensorSpec, TensorMeta, cut_own_part, local_part

State = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """A parameter to step."""

    group: int  # index of its group in the optimizer
    number: int  # of the parameter in the optimizer
    parameter: nn.Parameter  # of the optimizer
    shard: Tensor  # its local tensor
    gradient: Tensor  # local tensor
    state: State  # of the optimizer; empty before the first step
    local_state: State  # local tensors over the same memory
    own_gradient: Tensor | None = None  # of the parameter, which may have lost it when it is stepped


class StepRound:
    """One step, with the settings (such as learning rates) at the time this is created.

    The step runs on local tensors: an operator on a ``DTensor`` costs ten times as much for small parameters. On the
    host it uses the fused kernel if the user chose none by ``fused`` or ``foreach``: only this one reaches the memory
    bandwidth; its last bit differs from the others. Gradients are multiplied by ``factor`` first, in place.
    """

    def __init__(self, optimizer: Optimizer, *, is_on_host: bool, factor: Tensor | None = None) -> None:
        self.optimizer = optimizer
        self.factor = factor
        self._attributes = dict(vars(optimizer))
        self._is_on_host = is_on_host
        self._groups = [_freeze(group) for group in optimizer.param_groups]
        pairs = ((index, one) for index, group in enumerate(optimizer.param_groups) for one in group["params"])
        self._left = {parameter: (index, number) for number, (index, parameter) in enumerate(pairs)}

    def take(self, parameters: Iterable[nn.Parameter]) -> list[Member]:
        """Return the parameters with a gradient that were not taken yet."""
        members = []
        for parameter in parameters:
            if parameter.grad is None or parameter not in self._left:
                continue
            index, number = self._left.pop(parameter)
            state = self.optimizer.state[parameter]
            if isinstance(state.get("step"), int | float):
                on_device = any(self._groups[index].get(name) for name in ("fused", "capturable"))
                state["step"] = torch.tensor(float(state["step"]), device=parameter.device if on_device else "cpu")
            local_state = local_parts(parameter, state)
            shard, gradient = local_part(parameter), local_part(parameter.grad)
            for key, value in local_state.items():
                is_other = isinstance(value, Tensor) and value.dim() and value.shape != shard.shape
                if is_other and self.settings_of(index).get("fused"):  # kernels that check no sizes
                    check_state(self.optimizer, parameter, key, value)
            members.append(Member(index, number, parameter, shard, gradient, state, local_state, parameter.grad))
        return members

    def take_rest(self) -> list[Member]:
        """Return all parameters with a gradient that were not taken yet."""
        return self.take(list(self._left))

    @torch.no_grad()
    def run(self, members: Sequence[Member], *, is_on_host: bool | None = None) -> None:
        """Step ``members``, and write their states to the optimizer."""
        self.scale(members)
        proxies = [make_stand_in(one.shard, stored_like(one.gradient, one.shard)) for one in members]
        groups, states = [member.group for member in members], [dict(member.local_state) for member in members]
        self.step_proxies(groups, proxies, states, is_on_host=is_on_host)
        for member, state in zip(members, states, strict=True):
            publish_state(member, state)

    def scale(self, members: Sequence[Member]) -> None:
        """Multiply gradients by the factor, if there is one."""
        if self.factor is not None:
            apply_clip_factor([member.gradient for member in members], self.factor)

    @torch.no_grad()
    def step_proxies(
        self,
        groups: Sequence[int],
        proxies: Sequence[nn.Parameter],
        states: Sequence[State],
        *,
        is_on_host: bool | None = None,
    ) -> None:
        """Step local parameters of some groups, with states that change in place."""
        seen: dict[int, dict[str, Any]] = {}
        all_states: defaultdict[Tensor, State] = defaultdict(dict)
        for index, proxy, state in zip(groups, proxies, states, strict=True):
            if index not in seen:
                seen[index] = {**self.settings_of(index, is_on_host=is_on_host), "params": []}
            seen[index]["params"].append(proxy)
            all_states[proxy] = state
        kind = type(self.optimizer)
        plain_step(kind)(make_twin(kind, self._attributes, list(seen.values()), all_states))

    def settings_of(self, index: int, *, is_on_host: bool | None = None) -> dict[str, Any]:
        """Return the settings of a group in this step."""
        settings = self._groups[index]
        is_unnamed = settings.get("fused", False) is None and settings.get("foreach") is None
        is_on_host = self._is_on_host if is_on_host is None else is_on_host
        is_fused = is_on_host and is_unnamed and not settings.get("differentiable")
        return settings | {"fused": True} if is_fused else settings


def publish_state(member: Member, local: State) -> None:
    """Write a local state to the optimizer, in place: user code may hold the tensors, or may have replaced them."""
    for key, value in local.items():
        old = member.local_state.get(key)
        if value is old:
            continue
        if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
            old.copy_(value)
        else:
            member.state[key] = as_sharded(value, member.parameter, member.shard.shape)


def local_parts(parameter: nn.Parameter, state: State) -> State:
    """Return the local tensors of a state, for a step in another thread. Reading ``state`` blocks until that has ended.

    Tensors that user code wrote to it get the strides of the shard, as fused kernels check none; unsharded ones, whole
    or this rank's part, are sharded.
    """
    local, shard, is_sharded = dict(state), local_part(parameter), isinstance(parameter, DTensor)
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        now = own = local_part(value)
        is_fresh = is_sharded and now is value and bool(value.dim())
        if is_fresh and value.shape == parameter.shape != shard.shape:
            now = cut_own_part(value, cast(DTensor, parameter)).clone()
        if type(now) is Tensor and now.shape == shard.shape:
            now = stored_like(now, shard)
        if is_fresh or now is not own:
            state[key] = as_sharded(now, parameter, shard.shape)
        local[key] = now.detach() if is_sharded and now is state[key] else now
    return local


def check_state(optimizer: Optimizer, parameter: nn.Parameter, key: str, value: object) -> None:
    """Refuse a value that user code wrote to an elementwise state if its shape is wrong."""
    if isinstance(value, Tensor) and local_part(value).shape == local_part(parameter).shape:
        return
    number = next(number for number, one in enumerate(iterate_parameters(optimizer)) if one is parameter)
    found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(
        f"{type(optimizer).__name__}.state[parameter {number}][{key!r}] must be a tensor of shape "
        f"{list(parameter.shape)}, got {found}: write torch.zeros_like(parameter), or reset it with "
        "optimizer.state.pop(parameter)."
    )


def as_sharded(value: Any, parameter: nn.Parameter, shape: torch.Size) -> Any:
    """Shard a tensor of the local ``shape`` as ``parameter`` is; return other values unchanged."""
    if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == shape):
        return value
    # DTensor.from_local would move it from the host to the device of the mesh.
    like = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=like)
    return DTensor(value, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def list_tensors(members: Iterable[Member]) -> list[Tensor]:
    """Return the tensors that a step reads and writes, as user code sees them."""
    tensors: list[Tensor] = []
    for member in members:
        # One copy at once: the submitted step may be adding states.
        found = (member.parameter, member.parameter.grad, *member.state.values())
        tensors += [value for value in found if isinstance(value, Tensor)]
    return tensors


def make_stand_in(shard: Tensor, gradient: Tensor) -> nn.Parameter:
    """Return a parameter over ``shard`` that has a gradient."""
    proxy = nn.Parameter(shard)
    proxy.grad = gradient
    return proxy


def _freeze(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the settings of a group: schedulers change it."""
    settings = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    if any(parameter.is_complex() for parameter in settings.pop("params")):  # which fused kernels do not know
        settings["fused"] = bool(settings.get("fused"))
    return settings
