"""Private names of FSDP2, ``DTensor`` and sharded checkpoints."""

import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import PurePath
from typing import IO, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState, alloc_storage, free_storage
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.serialization import _get_layout

from lightning_vram.private_names.dispatcher import without_dispatch
from lightning_vram.private_names.torch import PARAMETERS, local_shard_of, own_parameters

__all__ = ["DTensorSpec", "FSDPParamGroup", "TensorMeta", "free_storage", "unflatten_state_dict"]

MARKS = ("_fsdp", "_is_fsdp", "__composable_api")  # prefixes of attributes that fully_shard leaves on modules
RANKS_MARK = "_is_fsdp_managed_module"  # by which transformers knows that ranks must run the same layers
state_of: Callable[[Any], Any] = methodcaller("_get_fsdp_state")
"""Return the state of a module that ``fully_shard`` was called for."""


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called for a module: its weights may be resharded when its forward ends."""
    return isinstance(module, FSDPModule)


def waits_for_backward(hook: Callable[..., Any]) -> bool:
    """Whether a hook on a tensor is FSDP2's, which all-gathers weights and does not change the gradient."""
    return isinstance(getattr(hook, "__self__", None), FSDPState)


def prepare_class(kind: type[nn.Module], make_mixin: Callable[[type, type], type]) -> None:
    """Make ``fully_shard`` give modules of ``kind`` a class with ``make_mixin(FSDPModule, kind)``, if it differs."""
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
    """Make the end of this backward, whose layers are not sharded, that of the root ``module``."""
    state_of(module)._register_root_post_backward_final_callback()


def end_backward_once(module: Any) -> None:
    """Make each group end its backward once. Call it after the first forward of the root ``module`` has begun.

    Up to 2.11 FSDP2 lists the state of several modules once for each, and ends its backward as often: gradients would
    be reduced again while a step reads them.
    """
    states = state_of(module)._state_ctx.all_states
    states[:] = dict.fromkeys(states)


def can_reset() -> bool:
    """Whether a step that failed can be reset: from 2.13 on."""
    return hasattr(FSDPModule, "reset_iter_state")


def discard_step(parameter: Any) -> None:
    """Drop the unreduced gradients of a parameter of a group, and its all-gather buffers."""
    whole = getattr(parameter, "_unsharded_param", None)  # exists after its first all-gather
    if whole is not None:
        whole.grad = None
    if "unsharded_accumulated_grad" in vars(parameter):  # from 2.15 on they are in `whole`
        parameter.unsharded_accumulated_grad = None
    if parameter.grad_offload_event is not None:  # the copy to the host must not overwrite what the caller restores
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
        """Pass the value to the attribute that hides it: FSDP2 has set it, or ``module.to()`` has changed it."""
        value, attribute = own_parameters(self)[name], vars(self.owner).get(name)
        if attribute is not None:
            attribute.hides(value)
        return value


shards_integers = torch.torch_version.TorchVersion("2.13") <= torch.__version__
"""Whether FSDP2 shards integer parameters. Up to 2.11 it makes them parameters that could require gradients."""


def look_past_attribute(parameter: Any) -> None:
    """Make FSDP2 find a parameter of a group that an attribute of the same name hides, and not cast it.

    The method ``hides`` of the attribute is called with every value that FSDP2 sets or reads as the parameter.
    """
    info = parameter._module_info
    if info.param_name in vars(info.module):
        info.module = _Parameters(info.module)
        setattr(info.module, info.param_name, parameter.sharded_param)
        keep_dtype = partial(type(parameter).init_dtype_attrs, parameter, MixedPrecisionPolicy())
        parameter.init_dtype_attrs = lambda _: keep_dtype()  # up to 2.11 it casts integers, too


def dtype_to_compute(group: Any, parameter: Any) -> torch.dtype | None:
    """Return the all-gather dtype of a parameter of ``group``; ``None``: its own."""
    policy: MixedPrecisionPolicy = parameter.mp_policy if hasattr(parameter, "mp_policy") else group.mp_policy
    return policy.param_dtype


def put_back(parameter: Any, value: Tensor) -> None:
    """Set ``value`` in all modules that have a parameter of a group."""
    parameter._setattr_on_modules(value)


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks and state of a module that ``fully_shard`` was called for."""
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


class _InGraph:
    """Proxy of a state or a group in graphs, so that a loss that the module keeps does not keep all of its fit alive.

    The garbage collector does not see into graphs.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)

    @property
    def __self__(self) -> Any:
        owner = self._owner()
        if owner is None:
            raise RuntimeError(
                "backward() was called after the fit whose sharded weights it needs. Call it during the fit."
            )
        return owner

    def __call__(self, gradient: Tensor) -> Tensor:
        return FSDPState._pre_backward(self.__self__, gradient)

    def post_backward(self) -> None:
        self.__self__.post_backward()


class StateBase(FSDPState):
    """The state of a module."""

    @property
    def _pre_backward(self) -> _InGraph:  # type: ignore[override]
        return _InGraph(self)

    def find_hooked(self, output: Any) -> Any:
        """Return the tensors to set hooks on, from those that a layer returns."""
        return output

    def _register_pre_backward_hook(self, output: Any) -> Any:
        is_transformed = getattr(torch._C, "_are_functorch_transforms_active", bool)
        if not torch.is_grad_enabled() or is_transformed():
            return super()._register_pre_backward_hook(output)
        super()._register_pre_backward_hook(self.find_hooked(output))
        return output


class GroupBase(FSDPParamGroup):
    """Parameters that are all-gathered together; their dtypes are those of the all-gather."""

    fsdp_params: Any
    parameters: list[Any]  # all of them, in loops of ours; FSDP2 sees fewer while :meth:`showing` some

    @contextmanager
    def showing(self, parameters: Sequence[Any]) -> Generator[None, None, None]:
        """Let FSDP2 see only some parameters; with none, its loops over them do nothing."""
        self.fsdp_params = parameters
        try:
            yield
        finally:
            self.fsdp_params = self.parameters

    def use_wholes(self) -> None:
        """Put the gathered parameters into the modules."""
        raise NotImplementedError

    def use_shards(self) -> None:
        """Put the shards into the modules, and free the gathered parameters."""
        raise NotImplementedError

    def _to_unsharded(self) -> None:
        if not self.is_unsharded:
            self.use_wholes()
            self._sharded_state = ShardedState.UNSHARDED

    def _to_sharded(self) -> None:
        if not self.is_sharded:
            self.use_shards()
            self._sharded_state = ShardedState.SHARDED

    def fill(self, parameters: Sequence[Any]) -> None:
        """Copy the inputs of the all-gather to the gathered parameters, all at once: there is one rank."""
        inputs = [parameter.all_gather_inputs[0] for parameter in parameters]
        for parameter, given in zip(parameters, inputs, strict=True):
            parameter.init_all_gather_outputs([given.numel()], [given.dtype], 1, self.device)
            alloc_storage(parameter.all_gather_outputs[0])
        outputs = [parameter.all_gather_outputs[0] for parameter in parameters]
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(outputs)):
            torch._foreach_copy_(outputs, inputs)
        for parameter in parameters:
            if parameter.whole is None:
                parameter.init_unsharded_param()

    def take_gradients(self) -> dict[Any, Tensor]:
        """End the backward on one rank, where nothing is reduced; return the gradients."""
        taken = {}
        for parameter in self.parameters:
            whole = parameter.whole
            if whole is not None and whole.grad is not None:
                taken[parameter] = whole.grad
                whole.grad = None
        with self.showing(()):
            FSDPParamGroup.post_backward(self)
        return taken

    def given_up(self) -> None:
        """Called before the reset after an error."""

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        return FSDPParamGroup._register_post_backward_hook(_InGraph(self), args, kwargs)  # type: ignore[arg-type]

    # --- state ---

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather is running."""
        return self._all_gather_result is not None

    @property
    def is_before_backward(self) -> bool:
        """Whether it is all-gathered for a backward."""
        return self._training_state == TrainingState.PRE_BACKWARD

    @property
    def is_in_forward(self) -> bool:
        """Whether a module of the group is in its forward."""
        return self._training_state == TrainingState.FORWARD

    @property
    def num_shards(self) -> int:
        """Number of ranks that have a shard of each parameter."""
        return int(self._all_gather_process_group.size())

    def leave_backward(self) -> None:
        """Treat what its modules compute next as a new call.

        Otherwise FSDP2 adds what a reentrant checkpoint computes next to the call whose backward is over, and loses the
        gradients of all calls of a layer but one.
        """
        for module in self.modules:
            if isinstance(module, FSDPModule):  # FSDP2 still calls groups that were removed from their modules
                state: Any = module._get_fsdp_state()
                state._training_state = TrainingState.IDLE

    def forget_whole(self) -> None:
        """Reshard, if it is all-gathered."""
        self._to_sharded()

    # --- streams, of devices that have them ---

    @property
    def copy_in_stream(self) -> Any:
        """First stream of an all-gather; ``None`` on the host, and before the first step."""
        return None if self.device.type == "cpu" else getattr(self.comm_ctx, "all_gather_copy_in_stream", None)

    def gather_stream(self, *, async_op: bool) -> Any:
        """Return the stream that reads the shards; ``None`` on the host, and before the first step."""
        if self.copy_in_stream is None or self.num_shards == 1:
            return self.copy_in_stream
        return self.comm_ctx.get_all_gather_streams(async_op, self._training_state)[0]

    @property
    def reduced_event(self) -> torch.Event | None:
        """Event after the gradients are reduced."""
        return None if self.device.type == "cpu" else self._post_reduce_event

    @property
    def reduce_stream(self) -> Any:
        """Stream in which gradients are reduced."""
        context = self.comm_ctx
        return context.all_reduce_stream if self._is_hsdp else context.reduce_scatter_stream

    def await_reduce_stream(self) -> None:
        """Make the end of the backward wait for what is on :attr:`reduce_stream` now."""
        if self.device.type == "cpu":
            return
        stream = self.reduce_stream
        self._post_reduce_event = stream.record_event()
        events = getattr(self.comm_ctx, "_last_post_reduce_events", None)
        if events is not None:
            events[stream] = self._post_reduce_event

    # --- gradients ---

    def reduce_parts(self, parts: Iterable[tuple[Sequence[Any], torch.dtype | None]]) -> None:
        """Reduce the gradients of each group of parameters in a dtype; ``None``: its own."""
        sharded, training = self._sharded_state, self._training_state
        for part, dtype in parts:
            self._sharded_state, self._training_state = sharded, training
            self._reduce_dtype = dtype
            event: Any = self._post_reduce_event
            self._post_reduce_event = None  # otherwise the computation waits for it
            with self.showing(part):
                FSDPParamGroup.post_backward(self)
            if self._post_reduce_event is None:
                self._post_reduce_event = event

    def _init_mp_dtypes(self) -> None:
        for parameter in self.fsdp_params:
            parameter.init_dtype_attrs(parameter.mp_policy if hasattr(parameter, "mp_policy") else self.mp_policy)
        self._orig_dtype = None  # gradients are cast before the transfer
        self._reduce_dtype = None

    @property
    def _reduce_scatter_param_indices(self) -> Sequence[int]:
        return range(len(self.fsdp_params))  # of the parameters being reduced

    @_reduce_scatter_param_indices.setter
    def _reduce_scatter_param_indices(self, value: Sequence[int]) -> None:
        """Ignore it: it is derived."""

    def _reset_iter_state(self) -> None:
        self.given_up()
        super()._reset_iter_state()


class _OwnSetattr:
    """The parameters of a module whose ``__setattr__`` is its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def get(self, name: str) -> Any:
        return own_parameters(getattr(self._module, "owner", self._module)).get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


class ParameterBase(FSDPParam):
    """A parameter whose gradient keeps the dtype in which it was computed and reduced.

    Where FSDP2 has properties, which cost calls for each parameter and gather, it has attributes. They hide those.

    Attributes:
        all_gather_inputs: What the next all-gather reads: one flat shard on the device. To be set before it.
        whole: The all-gathered parameter, now or last; ``None`` before the first time.
        places: Where the module and others that share the parameter have it: parameters of a module, and the name.
    """

    all_gather_inputs: Any = ()
    offload_to_cpu = False  # the copy of a gradient to the host is not FSDP2's
    whole: Any = None
    places: list[tuple[Any, str]]
    _sharded_local_tensor = torch.empty(0)  # of which FSDP2 only reads whether it has extensions

    def begin(self) -> None:
        """Initialize."""
        vars(self).update(all_gather_inputs=(), offload_to_cpu=False)
        info = self._module_info
        modules = (info.module, *info.shared_modules), (info.param_name, *info.shared_param_names)
        self.places = [
            (own_parameters(m) if type(m).__setattr__ is nn.Module.__setattr__ else _OwnSetattr(m), name)
            for m, name in zip(*modules, strict=True)
        ]

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Dtype of the all-gather."""
        return self.sharded_param.dtype

    @property
    def name(self) -> str:
        """Its name in the root, once the root has run."""
        return self._param_fqn or self._module_info.param_name

    @property
    def memory(self) -> Tensor:
        """Memory of the shard: flat, with its padding."""
        return self._sharded_param_data

    @memory.setter
    def memory(self, value: Tensor) -> None:
        self._sharded_param_data = value

    def init_unsharded_param(self) -> None:
        """Create :attr:`whole` after the first all-gather, or the first in another dtype."""
        super().init_unsharded_param()  # type: ignore[no-untyped-call]
        self.whole = self._unsharded_param

    def forget_whole(self) -> None:
        """Create :attr:`whole` anew the next time, because the all-gather dtype changes."""
        self.all_gather_outputs = []
        self.whole = None
        vars(self).pop("_unsharded_param", None)

    @property
    def sharded_grad_dtype(self) -> None:
        """FSDP2 casts no reduced gradient: that is done before the transfer."""

    @sharded_grad_dtype.setter
    def sharded_grad_dtype(self, value: torch.dtype | None) -> None:
        """Ignore it: it is derived."""

    @property
    def unsharded_grad_dtype(self) -> torch.dtype:
        """Dtype in which a backward accumulates gradients."""
        return self.gathered_dtype


memory_of: Callable[[Any], Tensor] = attrgetter("_sharded_param_data")
"""Return the memory of a parameter's shard."""

calls_derived_dispatch = torch.torch_version.TorchVersion("2.13") <= torch.__version__
"""Whether operators call ``__torch_dispatch__`` of classes derived from ``DTensor``: otherwise only reads are seen."""


class AskedDTensor(DTensor):
    """A ``DTensor`` whose local part :meth:`give_local` returns; tensors get it as their class."""

    def give_local(self) -> Tensor:
        """Return the local part, after restoring the class of the tensor: this one hides it."""
        raise NotImplementedError

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        return self.give_local()


_slot: Any = DTensor._local_tensor
own_shard_of: Callable[[Any], Tensor] = _slot.__get__
"""Return the local shard of a ``DTensor``, bypassing :class:`AskedDTensor`."""
set_own_shard: Callable[[Any, Tensor], None] = _slot.__set__  # set the local shard of a ``DTensor`` of any class


def stored_shard(value: Any) -> Any:
    """Return :func:`own_shard_of` of a ``DTensor``, anything else unchanged: for steps, and for shapes."""
    return own_shard_of(value) if isinstance(value, DTensor) else value


def local_shard(value: Any) -> Any:
    """Return this rank's shard of a ``DTensor``, the very tensor, outside autograd; anything else unchanged."""
    return local_shard_of(value) if isinstance(value, DTensor) else value


_NUMBERS = {"__float__": float, "__index__": int, "__bool__": bool}


def _format(tensor: DTensor, spec: str) -> str:
    return format(tensor.item(), spec) if spec and not tensor.dim() else object.__format__(tensor, spec)


def read_numbers_by(read: Callable[[DTensor], Any] | None) -> None:
    """Read the number in a ``DTensor`` of one element by ``read``; ``None``: as PyTorch does."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._local_scalar_dense.default
    handlers.pop(operator, None)
    for name in vars(DTensor).keys() & {*_NUMBERS, "__format__"}:
        delattr(DTensor, name)
    if read is not None:
        handlers[operator] = lambda _, args, kwargs: read(args[0])
        for name, kind in _NUMBERS.items():  # torch.tensor([...]) calls these without dispatch
            setattr(DTensor, name, lambda tensor, kind=kind: kind(read(tensor)))
        setattr(DTensor, "__format__", _format)  # noqa: B010 - as those


def wrap_like(part: Tensor, like: DTensor) -> DTensor:
    """Return a tensor sharded as ``like``, with ``part`` as this rank's shard; nothing is sent or copied."""
    return DTensor(part, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def shard_like(whole: Tensor, like: DTensor) -> DTensor:
    """Shard a whole tensor, of any shape and dtype, as ``like``; nothing is sent."""
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(cut_own_shard(whole, spec), spec, requires_grad=False)  # type: ignore[no-untyped-call]


def place_of_own_shard(like: DTensor | DTensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard of a tensor sharded as ``like``, and its offset."""
    with without_dispatch():  # torch computes with tensors, whose values an estimate would not have
        return compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)


def cut_own_shard(whole: Tensor, like: DTensor | DTensorSpec) -> Tensor:
    """Return, as a view, this rank's shard of a whole tensor, as ``like`` is sharded."""
    lengths, offsets = place_of_own_shard(like)
    part = whole.detach()
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        part = part.narrow(dimension, offset, length)
    return part


_KNOWN: dict[tuple[str, str], Any] = {
    **{(classes.__name__, name): getattr(classes, name) for name in classes.__all__},
    (classes.__name__, _MEM_FORMAT_ENCODING.__name__): _MEM_FORMAT_ENCODING,
    (_StorageInfo.__module__, _StorageInfo.__name__): _StorageInfo,
    (_get_layout.__module__, _get_layout.__name__): _get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
}


def read_metadata(file: IO[bytes]) -> Metadata:
    """Read ``.metadata`` without running code: contents that ``FileSystemWriter`` never writes raise an error."""
    metadata = _Reader(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
    return metadata


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):  # where it was written, perhaps on Windows
            return PurePath
        if (module, name) == ("builtins", "getattr"):  # Python 3.11 pickles members of an Enum by it
            return _member
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def _member(kind: type, name: str) -> Any:
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it holds builtins.getattr")
    return _MEM_FORMAT_ENCODING[name]
