"""Load the state of an optimizer over bf16 weights without casting it to bf16, as ``torch.optim`` would."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.optimizers.stepping import iterate_parameters
from lightning_vram.private_names.torch.optimizers import LOAD_HOOKS


def load_wide(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
    lean_parameters: Container[nn.Parameter],
) -> None:
    """Do what ``load``, an optimizer's ``load_state_dict``, does, but load the states of lean parameters as fp32."""
    hooks = {name: vars(optimizer)[name] for name in LOAD_HOOKS}
    # The hooks see the optimizer as it is: before and after, without the stand-ins.
    before, after = hooks.values()
    state_dict = state_dict.copy()
    for hook in before.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    groups = optimizer.param_groups
    stand_ins = {
        p: nn.Parameter(torch.empty(0, dtype=torch.float32, device=p.device)) if p in lean_parameters else p
        for p in iterate_parameters(optimizer)
    }
    vars(optimizer).update({name: OrderedDict() for name in LOAD_HOOKS})
    optimizer.param_groups = [{**group, "params": [stand_ins[p] for p in group["params"]]} for group in groups]
    try:
        load(state_dict)
        _put_back(optimizer, groups, {stand_in: parameter for parameter, stand_in in stand_ins.items()})
    except BaseException:
        optimizer.param_groups = groups
        raise
    finally:
        vars(optimizer).update(hooks)
    for hook in after.values():
        hook(optimizer)


def _put_back(optimizer: Optimizer, groups: list[dict[str, Any]], real: Mapping[Tensor, nn.Parameter]) -> None:
    """Let groups and states name the real parameters again."""
    states: defaultdict[Tensor, Any] = defaultdict(dict)
    states.update({real.get(key, key): state for key, state in optimizer.state.items()})
    optimizer.state = states
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        loaded["params"] = group["params"]
