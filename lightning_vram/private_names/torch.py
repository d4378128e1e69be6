"""Private names of torch: tensors, modules, autograd, autocast, optimizers and data loaders."""

import inspect
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from types import FunctionType
from typing import Any

import torch
import torch.nn.modules.module as hooks_of_all_modules
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.conv import _ConvNd as ConvBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
from torch.nn.modules.loss import _Loss as LossBase
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.nn.utils import parametrize
from torch.numa.binding import _bind_all_threads_in_current_process_to_logical_cpus as bind_threads
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

__all__ = ["BatchNormBase", "ConvBase", "IncompatibleKeys", "InstanceNormBase", "LossBase", "NormBase"]
__all__ += ["tree_flatten", "tree_is_leaf", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
__all__ += ["StopRecomputation", "bind_threads"]

_LEAVES = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout})


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Find the tensors in a tree of arguments or results."""
    found: list[Tensor] = []
    _collect(tree, found)
    return iter(found)


def _collect(tree: Any, found: list[Tensor]) -> None:
    """Walk common containers without pytree's lookups: each operator's arguments are walked several times."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for part in tree:
            _collect(part, found)
    elif kind is dict:
        for part in tree.values():
            _collect(part, found)
    elif kind not in _LEAVES:
        found.extend(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


storage_identity: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
"""Return the identity of the memory of a tensor."""
count_storage_users: Callable[[int], int] = torch._C._storage_Use_Count
"""Return how many users the memory of this identity has."""
num_writes: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor was written. Views share the number."""
is_view: Callable[[Tensor], bool] = torch.Tensor._is_view  # whether a tensor is a view, to autograd
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")  # the tensor that another is a view of, to autograd
VIEW_PROPERTIES = frozenset({"_base", "_version"})  # attributes that identify views and writes
without_torch_function: Any = torch._C.DisableTorchFunctionSubclass  # make a context without ``__torch_function__``


def make_wrapper(kind: type[Tensor], shape: Sequence[int], **options: Any) -> Any:
    """Return a tensor of a class that stores its values in other tensors; ``options``: dtype, device, strides."""
    return torch.Tensor._make_wrapper_subclass(kind, tuple(shape), **options)


def ends_of_graph(tensor: Tensor) -> list[Any]:
    """Return the nodes that ``tensor`` keeps alive: its own, and that of its base (of views made under ``no_grad``)."""
    try:
        found = [one.grad_fn for one in (tensor, tensor._base) if one is not None]
    except RuntimeError:  # a view that was written to where no graph may be made
        found = [] if tensor._base is None else [tensor._base.grad_fn]
    return [node for node in found if node is not None]


storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""Return the identity of a storage; another may have it later."""


def accumulation_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """Return the hooks that wait for the gradient to be accumulated."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether hooks wait for the gradient to be accumulated in ``parameter``, but those with ``only_tells``."""
    return not all(getattr(hook, "only_tells", False) for hook in accumulation_hooks(parameter))


sparse_indices: Callable[[Tensor], Tensor] = torch.Tensor._indices  # the indices of a COO tensor as they are stored
sparse_values: Callable[[Tensor], Tensor] = torch.Tensor._values  # the values of a COO tensor as they are stored


local_shard_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return the local shard of a ``DTensor``: the very tensor, past autograd."""


free_pinned_memory: Callable[[], None] = getattr(torch._C, "_host_emptyCache", lambda: None)
"""Free the pinned memory that torch caches."""


def gradient_hooks(tensor: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """Return the hooks of ``Tensor.register_hook``."""
    return list((tensor._backward_hooks or {}).values())


PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"  # names of dictionaries in ``vars`` of a module
FORWARD_HOOKS, FORWARD_PRE_HOOKS = "_forward_hooks", "_forward_pre_hooks"
SEE_OUTPUT = (FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
"""Names of hooks that see the output, or its gradient."""
SEE_INPUT = (FORWARD_PRE_HOOKS, *SEE_OUTPUT)  # names of hooks that see the input or the output, or a gradient
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
    """Whether ``module`` has hooks of one of these kinds, but those with ``only_tells``."""
    found = (hook for kind in kinds for hook in getattr(module, kind, {}).values())
    return not all(getattr(hook, "only_tells", False) for hook in found)


def have_all_modules_hooks(kinds: Collection[str]) -> bool:
    """Whether global hooks of one of these kinds exist, except for those of :func:`observe_forwards`."""
    found = (hook for kind in kinds for hook in getattr(hooks_of_all_modules, f"_global{kind}", {}).values())
    return any(not hasattr(hook, _LOOKS_ON) for hook in found)


def observe_forwards(before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
    """Call functions before and after all forwards, which use no tensor. Returns a function that undoes it."""
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
    """Run a convolution that is not transposed with another weight and bias."""
    output: Tensor = convolution._conv_forward(input, weight, bias)
    return output


def check_dimensions(norm: Any, input: Tensor) -> None:
    """Raise ``ValueError`` for an input of other dimensions, as the norm itself does."""
    norm._check_input_dim(input)


def metadata_of(state_dict: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the versions of modules in a state dict; ``None`` if it has none."""
    return getattr(state_dict, "_metadata", None)


def set_metadata(state_dict: OrderedDict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Put versions of modules into a state dict."""
    state_dict._metadata = metadata  # type: ignore[attr-defined]


_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def is_compiled_by_lightning(module: nn.Module) -> bool:
    """Whether the steps of ``module`` are compiled: it was compiled before a Trainer got it."""
    return getattr(module, "_compiler_ctx", None) is not None


def forget_compiled_steps(module: nn.Module) -> None:
    """Let a copy of a module run its own code: its compiled steps are those of the original."""
    if is_compiled_by_lightning(module):
        for name in _STEPS:
            vars(module).pop(name, None)
        vars(module)["_compiler_ctx"] = None


current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return which backward runs in this thread; -1 for none."""
current_graph_group: Callable[[], Any] = torch._C._get_graph_exec_group
"""Return the ``GraphExecGroup`` that this thread is in, whose backwards count as one; ``None`` outside."""
retains_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Return whether the backward that runs in this thread retains its graph, so that another one may follow."""
make_saved_tensor: Callable[..., Any] | None = getattr(torch._C._autograd, "_make_saved_tensor", None)
"""Save a tensor, ``is_output`` of the node or not; returns an object with ``unpack``."""
num_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return how many nodes of the graph were created in this thread: one per operator with a gradient."""
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Return the number of a node of the graph in its thread, above those of all its inputs."""


def may_stop_early() -> bool:
    """Whether recomputation may end with the last tensor that is needed, by ``set_checkpoint_early_stop``."""
    return getattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", None) is not False


SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack and unpack functions


ENGINE = (torch.autograd, "_engine_run_backward")  # the function that all backwards call
run_backward: Callable[..., Any] = getattr(*ENGINE)


def replace_run_backward(run: Callable[..., Any]) -> None:
    """Let ``torch.autograd.backward`` and ``grad`` call ``run``."""
    setattr(*ENGINE, run)


def has_own_result(node: Any) -> bool:
    """Whether a node of the graph has saved its result, or may have; not while it is saving it."""
    saved = getattr(node, "_raw_saved_result", None)
    if saved is None or not hasattr(saved, "data") or not hasattr(saved, "unpack_hook"):
        return True
    if saved.data is not None or saved.unpack_hook is not None:
        return True  # others save it
    try:
        return node._saved_result is not None
    except RuntimeError:  # it had its result, and a backward has freed it
        return True


def innermost_hooks() -> SavedTensorHooks | None:
    """Return the saved-tensor hooks that autograd would call now."""
    ignore_is_tracing = False
    top: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(ignore_is_tracing)
    return top


def push_hooks(hooks: SavedTensorHooks) -> None:
    """Set saved-tensor hooks, inside all others."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""Remove the innermost saved-tensor hooks."""


# From 2.15 on, a user's selective checkpoint inside saved-tensor hooks of ours warns that a later version will pass its
# saved tensors to them. That concerns only us: the user has set no hooks.
_WARNING = ("ignore", re.compile("A saved_tensors_hooks context", re.IGNORECASE), FutureWarning, None, 0)
_MAY_WARN = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


def hide_warning_of_hooks() -> None:
    """Prevent the warning about hooks that we are about to set."""
    if _MAY_WARN and _WARNING not in warnings.filters:  # each new filter lets all other warnings be shown once more
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)


may_set_hooks: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""Whether saved-tensor hooks are allowed here."""


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` is active."""
    return bool(torch._C._are_functorch_transforms_active())  # Dynamo takes the interpreter's stack for full


def is_in_forward_ad() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


@contextmanager
def outside_of_vmap() -> Iterator[None]:
    """Leave the levels of ``autograd.grad(is_grads_batched=True)``, in which nothing random may be drawn."""
    depth = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth):
            torch._C._vmapmode_increment_nesting()


AVAILABILITY = (torch._C, "_is_autocast_available")  # the function that checks whether a device type supports autocast
CAST_ARGUMENTS = (torch.amp.autocast_mode, "_cast")
"""The function that casts the arguments of ``custom_fwd``: takes a nest, a device type and a dtype."""
STEP_IF_FINITE = "_maybe_opt_step"
"""The method of ``GradScaler`` that steps an optimizer if it found no infinite gradient."""
without_autocast: Any = torch._C._DisableAutocast  # make a context without autocast for any device


def scale_of(scaler: GradScaler) -> Tensor | None:
    """Return the scale; ``None`` before the first loss, and if ``scaler`` is disabled."""
    return getattr(scaler, "_scale", None)


def first_scale_of(scaler: GradScaler) -> float:
    """Return the scale of the first loss; 1 if ``scaler`` is disabled."""
    return scaler._init_scale if scaler.is_enabled() else 1.0


def set_scale(scaler: GradScaler, scale: Tensor | None) -> None:
    """Set the scale of ``scaler``, on the device of the tensor."""
    scaler._scale = scale


optimizer_states: Callable[[GradScaler], dict[int, dict[str, Any]]] = attrgetter("_per_optimizer_states")
"""Return the state of a scaler for each optimizer, by id: the very dictionary."""


_FLAGS: list[tuple[Any, Any]] = [  # how to read each, and how to write it
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
]


def read_flags() -> list[Any]:
    """Return all settings: the default dtype, backends of attention, cuDNN and oneDNN, deterministic algorithms."""
    return [read() for read, _ in _FLAGS]


def write_flags(values: list[Any]) -> None:
    """Set what :func:`read_flags` returned, where it differs from now."""
    for (read, write), value in zip(_FLAGS, values, strict=True):
        if read() != value:
            write(value)


def is_parametrization_cached() -> bool:
    """Whether ``parametrize.cached()`` is entered."""
    return bool(parametrize._cache_enabled)


FOREACH_TYPES: tuple[list[Any], ...] = (_foreach_supported_types, _foreach_utils._foreach_supported_types)
"""The lists of tensor classes that foreach kernels support."""


def is_initialized(optimizer: Optimizer) -> bool:
    """Whether its class called ``Optimizer.__init__``, and it can have hooks."""
    return hasattr(optimizer, "_optimizer_state_dict_pre_hooks")


step_pre_hooks: Callable[[Optimizer], Any] = attrgetter("_optimizer_step_pre_hooks")
"""Return the hooks that run before the step of an optimizer."""


def group_reader(kind: type[Optimizer]) -> object:
    """Return the function with which the step of a class of ``torch.optim`` reads a group and creates states."""
    return getattr(kind, "_init_group", None)


def is_wrapped_by_scheduler(step: object) -> bool:
    """Whether ``step`` is a scheduler's wrapper, which only records the call."""
    return isinstance(step, FunctionType) and hasattr(step, "_wrapped_by_lr_sched")


def staying_iterator(loader: DataLoader[Any]) -> Any | None:
    """Return the iterator of ``persistent_workers``, once it exists."""
    return getattr(loader, "_iterator", None)
