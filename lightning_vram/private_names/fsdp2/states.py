"""Private names of FSDP2: what a module is sharded by, to reset it after an error and to take it off again."""

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls

from lightning_vram.private_names.torch.modules import PARAMETERS, own_parameters

MARKS = ("_fsdp", "_is_fsdp", "__composable_api")  # how attributes begin that fully_shard leaves on modules
RANKS_MARK = "_is_fsdp_managed_module"  # by which transformers sees that ranks must run the same layers


state_of: Callable[[Any], Any] = methodcaller("_get_fsdp_state")
"""Return the state of a module that ``fully_shard`` was called for."""


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called for a module: its weights may go when its forward ends."""
    return isinstance(module, FSDPModule)


def waits_for_backward(hook: Callable[..., Any]) -> bool:
    """Whether a hook on a tensor is FSDP2's, which gathers what the backward needs and leaves the gradient alone."""
    return isinstance(getattr(hook, "__self__", None), FSDPState)


def prepare_class(kind: type[nn.Module], make_mixin: Callable[[type, type], type]) -> None:
    """Let ``fully_shard`` give modules of ``kind`` a class with ``make_mixin(FSDPModule, kind)``, where it differs."""
    mixin = make_mixin(FSDPModule, kind)
    if kind not in cls_to_fsdp_cls and mixin is not FSDPModule:
        cls_to_fsdp_cls[kind] = type(f"FSDP{kind.__name__}", (mixin, kind), {"__deepcopy__": _refuse_copy})


def _refuse_copy(module: Any, memo: Any) -> NoReturn:
    """As FSDP2 does."""
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def groups_of(module: Any) -> list[Any]:
    """Return the groups of parameters of such a module."""
    state = state_of(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def is_root(module: Any) -> bool | None:
    """Whether such a module is the outermost; ``None`` before the first forward."""
    is_outermost: bool | None = state_of(module)._is_root
    return is_outermost


def announce_backward(module: Any) -> None:
    """Have the end of this backward, whose layers are not sharded, be that of the root ``module``."""
    state_of(module)._register_root_post_backward_final_callback()


def end_backward_once(module: Any) -> None:
    """Let each group end its backward once. Call it after the first forward of the root ``module`` has begun.

    Up to 2.11 FSDP2 lists the state of several modules once for each of them, and ends its backward as often: gradients
    would be reduced again while a step reads them.
    """
    states = state_of(module)._state_ctx.all_states
    states[:] = dict.fromkeys(states)


def can_reset() -> bool:
    """Whether a step that failed can be given up: from 2.13 on."""
    return hasattr(FSDPModule, "reset_iter_state")


def discard_step(parameter: Any) -> None:
    """Drop the unreduced gradients of a parameter of a group, and buffers it was to be gathered in."""
    whole = getattr(parameter, "_unsharded_param", None)  # made by its first gathering
    if whole is not None:
        whole.grad = None
    if "unsharded_accumulated_grad" in vars(parameter):  # from 2.15 on they are in `whole`
        parameter.unsharded_accumulated_grad = None
    if parameter.grad_offload_event is not None:  # the copy to the host must not write over what the caller restores
        parameter.grad_offload_event.synchronize()
        parameter.grad_offload_event = None
    parameter.free_unsharded_param()


def place_of(parameter: Any) -> tuple[nn.Module, str]:
    """Return the first module that has a parameter of a group, and its name there."""
    module = parameter._module_info.module
    return module.owner if isinstance(module, _Parameters) else module, parameter._module_info.param_name


class _Parameters(nn.Module):
    """The parameters of ``owner``, without its attributes."""

    owner: nn.Module

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        vars(self).update({PARAMETERS: own_parameters(owner), "owner": owner})

    def __setattr__(self, name: str, value: Any) -> None:
        own_parameters(self)[name] = value
        getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        """Give the value to the attribute that hides it: FSDP2 has put it there, or ``module.to()`` has changed it."""
        value, attribute = own_parameters(self)[name], vars(self.owner).get(name)
        if attribute is not None:
            attribute.hides(value)
        return value


shards_integers = torch.torch_version.TorchVersion("2.13") <= torch.__version__
"""Whether FSDP2 shards parameters of integers. Up to 2.11 it makes parameters that could require gradients of them."""


def look_past_attribute(parameter: Any) -> None:
    """Let FSDP2 find a parameter of a group that an attribute of the same name hides, and not cast it.

    The method ``hides`` of the attribute is called with every value that FSDP2 sets or reads as the parameter.
    """
    info = parameter._module_info
    if info.param_name in vars(info.module):
        info.module = _Parameters(info.module)
        setattr(info.module, info.param_name, parameter.sharded_param)
        keep_dtype = partial(type(parameter).init_dtype_attrs, parameter, MixedPrecisionPolicy())
        parameter.init_dtype_attrs = lambda _: keep_dtype()  # up to 2.11 it casts integers, too


def dtype_to_compute(group: Any, parameter: Any) -> torch.dtype | None:
    """Return what a parameter of ``group`` is gathered in; ``None``: in its own dtype."""
    policy: MixedPrecisionPolicy = parameter.mp_policy if hasattr(parameter, "mp_policy") else group.mp_policy
    return policy.param_dtype


def put_back(parameter: Any, value: Tensor) -> None:
    """Set ``value`` wherever modules have a parameter of a group."""
    parameter._setattr_on_modules(value)


def remove_hooks(module: nn.Module) -> None:
    """Take hooks and state off a module that ``fully_shard`` was called for."""
    state = state_of(module)
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()
    for group in groups_of(module):
        hooks = (group._module_to_pre_save_state_dict_hook_handle, group._module_to_pre_load_state_dict_hook_handle)
        for handle in (handle for handles in hooks for handle in handles.values()):
            handle.remove()
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    _module_state_mapping.pop(module, None)
