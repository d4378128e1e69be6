"""Private names of torch's dispatcher, operators and compiler, of fake tensors and fake ranks."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from operator import attrgetter
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch import config
from torch._guards import detect_fake_mode
from torch._inductor import list_options
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torch.utils import backend_registration
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_dispatch_modes
from typing_extensions import override

from lightning_vram.private_names.torch import is_compiled_by_lightning, tree_leaves

__all__ = ["FakeTensor", "FakeTensorMode", "detect_fake_mode", "is_traceable_wrapper_subclass"]
__all__ += ["DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"]
__all__ += ["HigherOrderOperator", "OpOverload", "OpOverloadPacket", "OptimizedModule", "TorchDispatchMode"]
__all__ += ["current_dispatch_mode", "current_dispatch_modes", "is_traceable_wrapper_subclass_type", "without_modes"]

DispatchKey = torch._C.DispatchKey
UNKNOWN_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
ASK_DEVICE = torch.ops.prim.device.default
"""C++ asks fake tensors for their device with this operator, twice as often as it runs others. A mode that changes
nothing returns ``tensor.device``, which fake tensors answer in Python."""
without_dispatch: Any = torch._C._DisableTorchDispatch
"""Make a context in which no dispatch mode and no subclass sees what runs."""
is_key_excluded: Any = torch._C._dispatch_tls_is_dispatch_key_excluded
"""Whether operators skip a dispatch key in this thread."""
set_key_excluded: Any = torch._C._SetExcludeDispatchKeyGuard
"""Make a context in which operators skip a dispatch key, or do not."""


class UnwrappedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode without torch's wrapper that hides each call from Dynamo: it hides itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_PLAIN_TYPES = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout})


class QuickFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode that caches by one tuple per plain tensor: torch's makes an object of 17 fields and a flat list."""

    @override
    def _prep_args_for_hash(self, result: list[Any], args: Any, *state: Any) -> None:
        if not isinstance(args, list | tuple):
            super()._prep_args_for_hash(result, args, *state)
            return
        result += (type(args), len(args))
        for arg in args:
            if self._is_plain(arg):
                result.append(
                    (
                        *(arg.dtype, arg.shape, arg.stride(), arg.storage_offset(), arg.untyped_storage().nbytes()),
                        *(arg.device, arg.requires_grad, arg.is_conj(), arg.is_neg(), arg.is_inference()),
                    )
                )
            elif type(arg) in _PLAIN_TYPES:
                result += (type(arg), arg)
            elif isinstance(arg, list | tuple):
                self._prep_args_for_hash(result, arg, *state)
            else:
                super()._prep_args_for_hash(result, (arg,), *state)

    def _is_plain(self, arg: Any) -> bool:
        return (
            isinstance(arg, FakeTensor)
            and arg.fake_mode is self
            and arg.constant is None
            and arg.layout is torch.strided
            and not arg.is_quantized
        )


UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
TO_COPY = torch.ops.aten._to_copy.default
READ_NUMBER = torch.ops.aten._local_scalar_dense.default
BATCH_NORM = torch.ops.aten._native_batch_norm_legit.default
BATCH_NORM_WITHOUT_STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats
EMBEDDING_BAG = torch.ops.aten._embedding_bag.default
CTC_BACKWARDS = torch.ops.aten._ctc_loss_backward.default, torch.ops.aten._ctc_loss_backward.Tensor
INDEX_PUT = torch.ops.aten._index_put_impl_.default
MKLDNN_RNN = torch.ops.aten.mkldnn_rnn_layer.default
PACK_SEQUENCES = torch.ops.aten._pack_padded_sequence.default
GROUPED_MM = torch.ops.aten._grouped_mm.default
RECURRENT_FUNCTIONS: Any = torch._VF

copy_each: Any = torch._foreach_copy_  # copy each tensor of the second list to that of the first
add_to_each: Any = torch._foreach_add_  # add a number to each tensor, in place
multiply_each: Any = torch._foreach_mul_  # multiply each tensor by a factor, in place
norm_each: Any = torch._foreach_norm  # the 2-norm of each tensor
batch_norm_and_statistics: Callable[..., Any] | None = getattr(torch, "_batch_norm_impl_index", None)
"""The operator inside ``F.batch_norm``, which chooses cuDNN and returns the statistics too. Not in all versions."""


def order_by_group(tensors: list[Tensor]) -> list[Tensor]:
    """Return ``tensors`` in the order of ``get_total_norm``: by device and dtype."""
    groups: Any = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item]
    return [tensor for (of_group,), _ in groups.values() for tensor in of_group]


schema_of: Callable[[Any], Any] = attrgetter("_schema")  # what an operator overload reads, writes and returns


def given_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator overload by name, without those left out."""
    names = [argument.name for argument in schema_of(function).arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def is_composite_operator(function: Any) -> bool:
    """Whether an operator overload has a kernel, in C++, that calls other operators."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), DispatchKey.CompositeImplicitAutograd)


def run_composite_kernel(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Run that kernel: the one that runs under autograd. ``decompose`` prefers Python's, which may round otherwise."""
    return function._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


overload_name: Callable[[Any], str] = attrgetter("_overloadname")  # the name of the signature of an operator overload
all_operator_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
"""Return the names of all registered operators, with signatures."""


def is_foreach(function: Any) -> bool:
    """Whether an operator does the same to many tensors at once, as fused optimizers do."""
    return bool(function.namespace == "aten" and function.__name__.startswith("_foreach"))


_NAMES = ("_trilinear", "_sparse_addmm", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_CASTING = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))
_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor", "higher_order"})
_AUTOCAST_KEYS = [key for name, key in DispatchKey.__members__.items() if name.startswith("Autocast")]


def run_operator(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call an operator from ``__torch_dispatch__`` of a mode, with its arguments."""
    if not _may_cast_inside(func):
        return func(*args, **kwargs) if kwargs else func(*args)
    with ExitStack() as stack:
        for device_type, dtype in _autocast_of_caller(args, kwargs).items():
            stack.enter_context(torch.autocast(device_type, dtype))
        return func(*args, **(kwargs or {}))


@cache
def _may_cast_inside(func: Any) -> bool:
    if func in _CASTING:
        return True
    if not isinstance(func, OpOverload) or func.namespace in _NAMESPACES:
        return False
    return not any(map(func.has_kernel_for_dispatch_key, _AUTOCAST_KEYS))  # those run with autocast off


def _autocast_of_caller(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, torch.dtype]:
    """Return the devices of the arguments for which the caller had autocast on, with the dtypes."""
    devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} - {"meta"}
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return {device: torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}


VIEWS = "_unsafe_view _reshape_alias"
ELEMENTWISE = "_softmax _log_softmax _adaptive_avg_pool2d _adaptive_avg_pool3d"
GROWING = "_to_copy _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
SEVERAL_RESULTS = "_weight_norm_interface"
NORMS = "_fused_rms_norm"
BATCH_NORMS = "_native_batch_norm_legit"
EXACT_ARGUMENTS = (
    "_cdist_forward _ctc_loss _euclidean_dist _foreach_abs _foreach_lgamma _foreach_log _foreach_log10 "
    "_foreach_log1p _foreach_log2 _foreach_maximum _foreach_minimum _foreach_pow _pdist_forward"
)
EXACT_RESULTS = (
    "_cdist_forward _euclidean_dist _foreach_norm _foreach_pow _foreach_reciprocal _foreach_rsqrt _foreach_sqrt "
    "_log_softmax _pdist_forward"
)
PRODUCTS = (
    "_addmm_activation _int_mm _scaled_mm _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 "
    "_weight_int8pack_mm _weight_int4pack_mm"
)
CONVOLUTION = "_convolution"
RECURRENT = "_cudnn_rnn _lstm_mps _thnn_fused_lstm_cell _thnn_fused_gru_cell"
OTHER_PRODUCTS = "_trilinear _sparse_mm _sparse_addmm _cslt_sparse_mm"
ATTENTIONS = (
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps "
    "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward"
)
ACTIVATED_PRODUCT = "_addmm_activation"
LINEAR_ALGEBRA = "_linalg_"  # a prefix of operator names
DIVIDE_EACH, NORM_OF_EACH, COPY_TO = "_foreach_div", "_foreach_norm", "_to_copy"

# Autocast's keys come before autograd's, the second before the first. No kernel of torch has these two.
BEHIND_AUTOCAST = "AutocastIPU"
AUTOCAST = "AutocastHPU"

Kernel = Callable[..., Any]


def operator_named(name: str) -> Any:
    """Return the operator with a name such as ``"aten::norm.Scalar"``."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def operators_cast_for(device_type: str) -> frozenset[str]:
    """Return the names of the operators that autocast has a kernel for."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device_type.upper()}"))


@contextmanager
def kernels_at(key: str, kernels: Mapping[str, Kernel]) -> Iterator[None]:
    """Let operators, by name, run our kernels at one of the two keys, in this thread."""
    with ExitStack() as stack:
        others = stack.enter_context(torch.library._scoped_library("_", "IMPL"))
        others.fallback(torch.library.fallthrough_kernel, key)
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name, kernel in kernels.items():
            library.impl(name.removeprefix("aten::"), kernel, key)
        device_type = key.removeprefix("Autocast").lower()
        stack.callback(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type))
        torch.set_autocast_enabled(device_type, enabled=True)  # the keys of autocast are off by default
        stack.enter_context(torch._C._IncludeDispatchKeyGuard(getattr(torch._C.DispatchKey, key)))
        yield


def exclude_key(key: str) -> AbstractContextManager[None]:
    """Make a context in which operators skip ``key``."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return torch._C._ExcludeDispatchKeyGuard(keys)


flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
cudnn_attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
efficient_backward: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
math_attention: Any = torch.ops.aten._scaled_dot_product_attention_math.default


def preferred_backends() -> list[SDPBackend]:
    """Return the attention backends in the order in which they are tried."""
    return [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]


BACKEND_NAMES = (
    (torch._C, "_get_privateuse1_backend_name", True),
    (backend_registration, "_privateuse1_backend_name", False),
)
"""Where the name of the privateuse1 backend is stored, and whether in a function."""
INITIALISATION = (FakeTensorMode, "avoid_device_init")
"""The switch by which fake tensors do not initialize their device."""
CONVOLUTION_FORMAT = (torch._C, "_conv_determine_backend_memory_format")
"""The function that returns the memory format of a fake convolution, from input, weight and backend."""


def read_snapshot(kind: str) -> dict[str, Any] | None:
    """Return the state of the allocator of devices of ``kind``; ``None``: unavailable."""
    module = getattr(torch, kind, None)
    read: Any = getattr(getattr(module, "memory", None), "_snapshot", None)
    if module is None or read is None or not module.is_initialized():
        return None
    snapshot: dict[str, Any] = read()
    return snapshot


def set_device_module(kind: str, module: ModuleType) -> None:
    """Make ``module`` available as ``torch.KIND``."""
    torch._register_device_module(kind, module)  # type: ignore[no-untyped-call]
    _forget_device_modules()


def remove_device_module(kind: str) -> None:
    """Undo :func:`set_device_module`."""
    delattr(torch, kind)
    sys.modules.pop(f"torch.{kind}", None)
    _forget_device_modules()


_forget_device_modules: Callable[[], None] = getattr(torch.get_device_module, "cache_clear", lambda: None)


def mark_parameter(tensor: Any) -> None:
    """Make a tensor of a subclass pass as a parameter."""
    tensor._is_param = True


def swap_contents(first: Tensor, second: Tensor) -> None:
    """Exchange the contents of two tensors.

    Unlike ``torch.utils.swap_tensors`` it does not check for references: the mode has weak ones to all fake tensors,
    and graphs of earlier steps may be left.
    """
    torch._C._swap_tensor_impl(first, second)
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    for tensor in (first, second):
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # their counterparts in C++ were swapped
            if getattr(tensor, name) is not None:
                setattr(tensor, name, getattr(tensor, name))


BACKEND = "fake"


def connect_fake_ranks(kinds: Iterable[str], num_ranks: int) -> None:
    """Make the default process group one of fake ranks. This process is rank 0."""
    from torch.distributed._tools import fake_collectives  # noqa: F401 - registers operators
    from torch.testing._internal.distributed.fake_pg import FakeStore

    backend = ",".join(f"{kind}:{BACKEND}" for kind in kinds)
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=num_ranks)
    group: Any = dist.group.WORLD
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # otherwise torch warns at the end


@contextmanager
def disconnected() -> Iterator[None]:
    """Disconnect this process from all others inside the block; its process groups return afterwards."""
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    # The attributes are those of the object, not of the module; operators find groups by number.
    own: Any = type("World", (c10d._World,), dict.fromkeys((*names, "group_count")))()
    vars(own).update({name: {} for name in names}, group_count=1_000_000)
    before, c10d._world = c10d._world, own
    try:
        with _own_meshes():
            yield
    finally:
        c10d._world = before
        c10d._update_default_pg(before.default_pg)
        registry: Any = torch._C._distributed_c10d
        for group, name in before.pg_names.items():
            try:
                registry._resolve_process_group(name)
            except (LookupError, RuntimeError, ValueError):  # closing a group forgets all of them
                registry._register_process_group(name, group)


@contextmanager
def _own_meshes() -> Iterator[None]:
    """Make no mesh that is created inside equal to one outside: DTensor caches by mesh."""
    make = DeviceMesh.__init__

    def make_apart(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(mesh, *args, **kwargs)
        mesh._thread_id = -1  # no thread has it

    DeviceMesh.__init__ = make_apart  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh.__init__ = make  # type: ignore[method-assign]


COMPILED_PART = "_orig_mod"  # what ``torch.compile(module)`` inserts into names of submodules and parameters

EXACT_DIVISION: dict[str, Any] = dict.fromkeys({"eager_numerics.division_rounding"}.intersection(list_options()), True)
"""Option of ``torch.compile``, not in all versions: divide on a GPU as PyTorch's own kernels do."""

_AUTOCAST = "backward_pass_autocast"  # AOTAutograd's, not in all versions
has_backward_autocast = hasattr(config, _AUTOCAST)
read_backward_autocast = partial(getattr, config, _AUTOCAST, None)
set_backward_autocast = partial(setattr, config, _AUTOCAST)
"""``"off"``: code that is compiled from now on has a backward without autocast."""


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(module)``; any other unchanged."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is compiled: by ``torch.compile(module)`` or ``module.compile()``.

    A LightningModule that was compiled and then given to a Trainer counts: Lightning compiles its steps. A
    compiled function that a step calls cannot be seen.
    """
    return is_compiled_by_lightning(module) or any(map(is_compiled_part, module.modules()))


def is_compiled_part(module: nn.Module) -> bool:
    """Whether ``module`` itself is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def modules_in_compiled(model: nn.Module) -> set[nn.Module]:
    """Return the modules of ``model`` that run in compiled code, the compiled ones themselves included."""
    if is_compiled_by_lightning(model):
        return set(model.modules())
    return {inner for part in model.modules() if is_compiled_part(part) for inner in part.modules()}


def is_left_to_python(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` was called on ``function``."""
    return bool(getattr(function, "_torchdynamo_disable", False))


_Function = TypeVar("_Function", bound=Callable[..., object])


def hide_from_dynamo(function: _Function) -> _Function:
    """Return ``function``, which Dynamo will run as it is, with all that it calls."""
    # torch.compiler.disable wraps every call, a tenth of the cost of a dispatch mode. Marking the code costs nothing.
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function
