"""Moments in fewer bytes in the optimizer's ``state``."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.tensors.layout import state_stored_like
from lightning_vram.optimizers.stepping.state_forms import (
    MOMENTS,
    StateForm,
    is_narrow,
    narrow_state,
    widen_state,
    widened,
)
from lightning_vram.optimizers.stepping.step_round import Member, State, as_sharded, check_state, local_parts
from lightning_vram.optimizers.stepping.steppable import iterate_parameters
from lightning_vram.optimizers.stepping.update_check import UpdateCheck
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part

_to_widen: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()


class NarrowStates:
    """Moments of one optimizer in a form, for the parameters that ``takes`` returns true for, now or later."""

    def __init__(
        self,
        optimizer: Optimizer,
        takes: Callable[[nn.Parameter], bool],
        form: StateForm,
        check: UpdateCheck | None = None,
    ) -> None:
        self.form, self._check = form, check
        self._optimizer = optimizer
        self.has = takes  # whether the moments of a parameter have the form
        self._loading: dict[nn.Parameter, State] = {}
        handle = _to_widen.pop(optimizer, None)
        if handle is not None:  # of an earlier run
            handle.remove()

    @property
    def is_counting(self) -> bool:
        """Whether lost updates are counted in this step."""
        return self._check is not None and self._check.is_counting

    def rounded(self, state: State, start: int, seed: str, stored: State) -> State:
        """Round the state of a part of a parameter, and count lost updates of existing moments."""
        if self._check is None or not self._check.is_counting:
            return narrow_state(self.form, state, start, seed, stored)
        keys = [key for key in MOMENTS if is_narrow(stored.get(key))]
        before, stepped = [widened(stored[key]) for key in keys], [state[key].clone() for key in keys]
        narrow = narrow_state(self.form, state, start, seed, stored)
        for key, old, new in zip(keys, before, stepped, strict=True):
            self._check.count(old, new, narrow[key])
        return narrow

    def take_in(self, optimizer: Optimizer) -> None:
        """Convert the moments that the optimizer has or has loaded, one by one."""
        loading, self._loading = self._loading, {}
        for parameter, moments in loading.items():
            optimizer.state[parameter].update(moments)
        for parameter in filter(self.has, iterate_parameters(optimizer)):
            state = optimizer.state.get(parameter, {})
            self._convert(parameter, state, local_parts(parameter, state))

    def adopt(self, members: Sequence[Member]) -> None:
        """Convert moments that user code wrote to the states of members."""
        for member in members:
            if self.has(member.parameter):
                self._convert(member.parameter, member.state, member.local_state)

    def _convert(self, parameter: nn.Parameter, state: State, local_state: State) -> None:
        shard = local_part(parameter)
        for key in MOMENTS:
            value = local_state.get(key)
            if value is not None:
                check_state(self._optimizer, parameter, key, value)
                local_state[key] = self.form.convert(key, value, shard)
                if local_state[key] is not value:
                    state[key] = as_sharded(local_state[key], parameter, shard.shape)

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hold back moments while loading: ``torch.optim`` would upcast all of them at once."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = dict(
            zip(saved, iterate_parameters(optimizer), strict=False)
        )  # load_state_dict compares the numbers
        states = dict(state_dict["state"])
        for key, state in states.items():
            parameter = parameters.get(key)
            if parameter is not None and self.has(parameter) and isinstance(state, Mapping):
                self._loading[parameter] = {name: state[name] for name in MOMENTS if name in state}
                states[key] = {name: value for name, value in state.items() if name not in MOMENTS}
        return {**state_dict, "state": states}


def widen_when_stepped(optimizer: Optimizer) -> None:
    """Upcast moments at the next step of the optimizer itself: there may be no memory for them before."""

    def widen(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _to_widen.pop(optimizer).remove()
        for parameter, state in optimizer.state.items():
            if parameter.dtype == torch.float32 and any(is_narrow(local_part(state.get(key))) for key in MOMENTS):
                state.update(state_stored_like(widen_state(state), local_part(parameter)))

    _to_widen[optimizer] = optimizer.register_step_pre_hook(widen)
