"""Moments that are kept in fewer bytes between steps: in memory, where the optimizer's ``state`` has them."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.tensors.layout import state_stored_like
from lightning_vram.optimizers.stepping import (
    MOMENTS,
    State,
    StateForm,
    UpdateCheck,
    as_sharded,
    first_places,
    is_narrow,
    narrow_state,
    widen_state,
    widened,
)
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part

_to_widen: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()


class NarrowStates:
    """Those of one optimizer.

    Args:
        optimizer: Whose moments can be in the form.
        parameters: Those of it that are in the form, and maybe others.
        form: Of their moments.
        check: Counts updates of moments that are lost; ``None``: nobody does.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        form: StateForm,
        check: UpdateCheck | None = None,
    ) -> None:
        self.form, self._check = form, check
        self._parameters = set(parameters)
        self._places = first_places(optimizer)
        self._loading: dict[nn.Parameter, State] = {}
        handle = _to_widen.pop(optimizer, None)
        if handle is not None:  # of a run before
            handle.remove()

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether the moments of a parameter are in the form."""
        return parameter in self._parameters

    def number_of(self, parameter: nn.Parameter) -> int:
        """Return the number of a parameter in the optimizer."""
        return self._places[parameter][0]

    def first_place_of(self, parameter: nn.Parameter) -> int:
        """Return the place of the first weight of its local part in the whole of it."""
        return self._places[parameter][1]

    def take_in(self, optimizer: Optimizer) -> None:
        """Take parameters over that were added to the optimizer, as ``BackboneFinetuning`` adds them."""
        if sum(len(group["params"]) for group in optimizer.param_groups) == len(self._places):
            return
        known, self._places = self._places, first_places(optimizer)
        self._parameters.update(one for one in self._places if one not in known and self.form.takes(one))
        self.convert(optimizer)

    @property
    def is_counting(self) -> bool:
        """Whether updates that are lost are counted in this step."""
        return self._check is not None and self._check.is_counting

    def rounded(self, state: State, start: int, seed: str, kept: State) -> State:
        """Return a state of a part as it is kept: see :func:`narrow_state`. What existed before is counted."""
        if self._check is None or not self._check.is_counting:
            return narrow_state(self.form, state, start, seed, kept)
        keys = [key for key in MOMENTS if is_narrow(kept.get(key))]
        before, stepped = [widened(kept[key]) for key in keys], [state[key].clone() for key in keys]
        narrow = narrow_state(self.form, state, start, seed, kept)
        for key, old, new in zip(keys, before, stepped, strict=True):
            self._check.count(old, new, narrow[key])
        return narrow

    def convert(self, optimizer: Optimizer) -> None:
        """Bring the moments that the optimizer has now into the form, one after the other."""
        for parameter in self._places:
            state = optimizer.state.get(parameter) if parameter in self._parameters else None
            for key in MOMENTS if state else ():
                if state is not None and isinstance(state.get(key), Tensor):
                    state[key] = self._converted(key, state.pop(key), parameter)

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Take the moments out of what is loaded: ``torch.optim`` would make float32 of all of them at once."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = dict(zip(saved, self._places, strict=False))  # the optimizer complains of other numbers
        states = dict(state_dict["state"])
        for key, state in states.items():
            parameter = parameters.get(key)
            if parameter in self._parameters and isinstance(state, Mapping):
                assert parameter is not None
                self._loading[parameter] = {name: state[name] for name in MOMENTS if name in state}
                states[key] = {name: value for name, value in state.items() if name not in MOMENTS}
        return {**state_dict, "state": states}

    def after_load(self, optimizer: Optimizer) -> None:
        """Give the moments to the optimizer."""
        loading, self._loading = self._loading, {}
        for parameter, moments in loading.items():
            optimizer.state[parameter].update(moments)

    def _converted(self, key: str, value: Tensor, parameter: nn.Parameter) -> Any:
        shard = local_part(parameter)
        return as_sharded(self.form.convert(key, local_part(value), shard), parameter, shard.shape)


def widen_when_stepped(optimizer: Optimizer) -> None:
    """Have moments in float32 once the optimizer steps by itself: not before, there may be no memory for them."""

    def widen(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _to_widen.pop(optimizer).remove()
        for parameter in list(optimizer.state):
            state = optimizer.state[parameter]
            if parameter.dtype == torch.float32 and any(is_narrow(local_part(state.get(key))) for key in MOMENTS):
                optimizer.state[parameter] = state_stored_like(widen_state(state), local_part(parameter))

    _to_widen[optimizer] = optimizer.register_step_pre_hook(widen)
