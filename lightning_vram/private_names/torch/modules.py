"""What torch keeps in a module: its own parameters, buffers, children and hooks; and the base classes of its layers."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

import torch.nn.modules.module as hooks_of_all_modules
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
from torch.nn.modules.loss import _Loss as LossBase
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys

__all__ = ["BatchNormBase", "ConvBase", "IncompatibleKeys", "InstanceNormBase", "LossBase", "NormBase"]

PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
"""Names of dictionaries in ``vars`` of a module."""
FORWARD_HOOKS, FORWARD_PRE_HOOKS = "_forward_hooks", "_forward_pre_hooks"
SEE_OUTPUT = (FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
"""Names of hooks that see the output, or its gradient."""
SEE_INPUT = (FORWARD_PRE_HOOKS, *SEE_OUTPUT)
"""Names of hooks that see the input or the output, or a gradient."""
_LOOKS_ON = "_lightning_vram_looks_on"
RESET_ATTENTION = "_reset_parameters"
CHECKPOINT_WRAPPED = "_checkpoint_wrapped_module"


own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
"""Return the parameters of a module itself: the very dictionary."""
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)
"""Return the buffers of a module itself: the very dictionary."""
own_children: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(CHILDREN)
"""Return the children of a module: the very dictionary."""


forward_pre_hooks: Callable[[nn.Module], Mapping[int, Callable[..., Any]]] = attrgetter(FORWARD_PRE_HOOKS)
"""Return the hooks that see the input of a module."""


def has_hooks(module: nn.Module, kinds: Collection[str]) -> bool:
    """Whether ``module`` has hooks of one of these kinds."""
    return any(getattr(module, kind, None) for kind in kinds)


def have_all_modules_hooks(kinds: Collection[str]) -> bool:
    """Whether hooks of one of these kinds, but for those that only look on, are set on all modules there are."""
    found = (hook for kind in kinds for hook in getattr(hooks_of_all_modules, f"_global{kind}", {}).values())
    return any(not hasattr(hook, _LOOKS_ON) for hook in found)


def look_on(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Call functions of ours before and after all forwards, which see no tensor. Returns what undoes it."""
    for hook in (before, after):
        setattr(hook, _LOOKS_ON, True)
    handles = (
        hooks_of_all_modules.register_module_forward_pre_hook(before),
        hooks_of_all_modules.register_module_forward_hook(after, always_call=True),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def class_conv_forward(kind: type) -> Callable[..., Tensor] | None:
    """Return the method of a class of convolutions that takes a weight and a bias; ``None`` if it has none."""
    return getattr(kind, "_conv_forward", None)


def convolve_with(convolution: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a convolution that is not transposed makes of ``input`` with another weight and bias."""
    output: Tensor = convolution._conv_forward(input, weight, bias)
    return output


def can_pad_output(kind: type) -> bool:
    """Whether :func:`output_padding` works for a class."""
    return hasattr(kind, "_output_padding")


def output_padding(convolution: Any, *args: Any) -> Any:
    """Return the padding with which a transposed convolution gives the wanted size."""
    return convolution._output_padding(*args)


def check_dimensions(norm: Any, input: Tensor) -> None:
    """Refuse what the norm itself refuses: ``ValueError`` for an input of other dimensions."""
    norm._check_input_dim(input)


def can_check_dimensions(norm: nn.Module) -> bool:
    """Whether :func:`check_dimensions` works for ``norm``."""
    return hasattr(norm, "_check_input_dim")


def metadata_of(state_dict: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the versions of modules in a state dict; ``None`` if it has none."""
    return getattr(state_dict, "_metadata", None)


def set_metadata(state_dict: OrderedDict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Put versions of modules into a state dict."""
    state_dict._metadata = metadata  # type: ignore[attr-defined]
