"""CUDA's choice of kernels and casts, on a fake device: same memory, no GPU."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_vram.memory.estimate.cuda_kernels import CHANNELS_LAST, Capability, is_channels_last, kernels_of
from lightning_vram.memory.estimate.fake_device import FAKE_GPU, FAKE_GPU_TYPE, device_functions
from lightning_vram.memory.estimate.known_values import replaced
from lightning_vram.private_names import dispatcher
from lightning_vram.private_names import torch as private

_OF_A_KIND = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype")
_norm = torch.ops.aten.norm
_WITH_DTYPE = {_norm.Scalar: _norm.ScalarOpt_dtype, _norm.ScalarOpt_dim: _norm.ScalarOpt_dim_dtype}
_to_dtype = torch.ops.aten.to.dtype


# Lists of operators in the header, by what autocast does to their arguments.
_LOWER, _FLOAT32, _WIDEST = "LOWER_PRECISION_FP", "FP32", "PROMOTE"
_FLOAT32_RESULT, _FLOAT32_NORM = "FP32_SET_OPT_DTYPE", "DIFFERENT_REDISPATCH_SIGNATURE"  # unless a dtype is asked for
_REFUSED = "refused"  # by autocast_mode.cpp, which no wheel has
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"  # in every wheel


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let autocast of ``"cuda"`` cast fake tensors inside the block, in front of autograd: as part of the graph."""

    def as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: function(*("cuda" if arg == FAKE_GPU_TYPE else arg for arg in args), **kwargs)

    casts = _Casts()
    forget, construct = torch.clear_autocast_cache, torch.autocast.__init__
    (has_availability, available), (has_cast, cast) = private.AVAILABILITY, private.CAST_ARGUMENTS
    is_available, cast_arguments = getattr(has_availability, available), getattr(has_cast, cast)

    def forget_all() -> None:
        forget()
        casts.cached.clear()

    def enter(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        construct(self, "cuda" if device_type == FAKE_GPU_TYPE else device_type, *args, **kwargs)

    def cast_to(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast_arguments(value, FAKE_GPU_TYPE if device_type == "cuda" else device_type, dtype)

    functions = {name: as_cuda(getattr(torch, name)) for name in _OF_A_KIND}
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, {**functions, "clear_autocast_cache": forget_all}))
        stack.enter_context(replaced(torch.autocast, {"__init__": enter}))
        stack.enter_context(replaced(has_availability, {available: as_cuda(is_available)}))
        stack.enter_context(replaced(has_cast, {cast: cast_to}))
        stack.callback(casts.cached.clear)
        stack.enter_context(dispatcher.kernels_at(dispatcher.AUTOCAST, casts.kernels()))
        yield


class _Casts:
    """Casts as autocast of ``"cuda"`` is set in the running thread."""

    def __init__(self) -> None:
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}  # with the weight, so that its id stays its own

    def kernels(self) -> dict[str, Callable[..., Any]]:
        policies: dict[str, Callable[..., Any]] = {
            _LOWER: partial(self._cast_all, lambda _: torch.get_autocast_dtype("cuda")),
            _FLOAT32: partial(self._cast_all, lambda _: torch.float32),
            **dict.fromkeys((_FLOAT32_RESULT, _FLOAT32_NORM), _float32_result),
            _WIDEST: partial(self._cast_all, _widest),
            _REFUSED: _refuse,
        }
        there = dispatcher.operators_cast_for("cuda")
        return {
            name: partial(_run, policies[cast], dispatcher.operator_named(name))
            for name, cast in autocast_lists().items()
            if name in there
        }

    def _cast_all(self, dtype_for: Callable[[Any], torch.dtype], op: Any, args: Any, kwargs: Any) -> Any:
        dtype = dtype_for((args, kwargs))
        args, kwargs = private.tree_map(lambda leaf: self._cast(leaf, dtype), (args, kwargs))
        return op(*args, **kwargs)

    def _cast(self, leaf: Any, dtype: torch.dtype) -> Any:
        if not _is_eligible(leaf) or leaf.dtype is dtype:
            return leaf
        is_weight = leaf.requires_grad and leaf.is_leaf and not private.is_view(leaf) and leaf.dtype is torch.float32
        is_to_cache = dtype is torch.get_autocast_dtype("cuda") and torch.is_autocast_cache_enabled()
        if not (is_weight and is_to_cache) or torch.is_inference_mode_enabled():
            return _to_dtype(leaf, dtype)
        if id(leaf) not in self.cached:
            with torch.enable_grad():  # it serves later forwards, too
                self.cached[id(leaf)] = leaf, _to_dtype(leaf, dtype)
        return self.cached[id(leaf)][1]


def _run(policy: Callable[..., Any], op: Any, /, *args: Any, **kwargs: Any) -> Any:
    with dispatcher.exclude_key(dispatcher.AUTOCAST):
        is_on = torch.is_autocast_enabled("cuda") and any(map(_is_eligible, private.tree_leaves((args, kwargs))))
        return policy(op, args, kwargs) if is_on else op(*args, **kwargs)


def _is_eligible(leaf: Any) -> bool:
    is_ours = isinstance(leaf, Tensor) and leaf.device.type == FAKE_GPU_TYPE
    return is_ours and leaf.is_floating_point() and leaf.dtype is not torch.float64


def _float32_result(op: Any, args: Any, kwargs: Any) -> Any:
    """Let the kernel cast: no float32 copy of the input is made. Norms do it by another signature."""
    if not _is_eligible(args[0]):
        return op(*args, **kwargs)
    given = dispatcher.given_arguments(op, args, kwargs)
    if given.get("dtype") is None:
        given["dtype"] = torch.float32
    return _WITH_DTYPE.get(op, op)(**given)


def _widest(nest: Any) -> torch.dtype:
    has_float32 = any(leaf.dtype is torch.float32 for leaf in private.tree_leaves(nest) if _is_eligible(leaf))
    return torch.float32 if has_float32 else torch.get_autocast_dtype("cuda")


def _refuse(op: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(f"{op} is unsafe to autocast; CUDA refuses it. Use binary_cross_entropy_with_logits.")


@cache
def autocast_lists(header: Path = _HEADER) -> dict[str, str]:
    """Read how CUDA's autocast casts each operator, by its full name, from a header of torch."""
    text = header.read_text() if header.is_file() else ""
    lists = {cast: _names(text, cast) for cast in (_LOWER, _FLOAT32, _FLOAT32_RESULT, _FLOAT32_NORM, _WIDEST)}
    if not all(lists.values()):
        raise RuntimeError(
            f"the rules of autocast on CUDA cannot be read from {header.name} of torch {torch.__version__}; "
            "install torch with its headers, or estimate without autocast."
        )
    lists[_REFUSED] = ["aten::binary_cross_entropy"]
    return {name: cast for cast, names in lists.items() for name in names}


def _names(text: str, cast: str) -> list[str]:
    """Names in ``#define AT_FORALL_CAST(_) _(name) _(name, overload) _(..., "name.overload", ...)``."""
    match = re.search(rf"#define AT_FORALL_{cast}\(_\)((?:.*\\\n)*.*)", text)
    if match is None:
        return []
    if cast == _FLOAT32_NORM:
        return [f"aten::{name}" for name in re.findall(r'"([\w.]+)"', match[1])]
    entries = re.findall(r"\b_\((\w+)(?:,\s*(\w+))?\)", match[1])
    return [f"aten::{name}.{overload}" if overload else f"aten::{name}" for name, overload in entries]


_NOTHING = (
    *("ipc_collect", "init", "set_per_process_memory_fraction", "seed", "seed_all", "set_rng_state_all"),
    *("reset_max_memory_allocated", "reset_accumulated_memory_stats"),
)
_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_PIN_MEMORY = Tensor.pin_memory
_FROM_DATA = (torch.tensor, torch.as_tensor)


@contextmanager
def cuda_semantics(
    capability: Capability, *, num_bytes: int = 0, allocated_bytes: Callable[[], int] = lambda: 0
) -> Iterator[dict[str, None]]:
    """Let fake tensors use what CUDA's kernels use, in this block and thread; yields notes on the numbers, as keys."""
    notes: dict[str, None] = {}
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, _torch_cuda(capability, num_bytes, allocated_bytes)))
        stack.enter_context(cuda_autocast())
        stack.enter_context(dispatcher.kernels_at(dispatcher.BEHIND_AUTOCAST, kernels_of(capability, notes)))
        for owner, name, value in _replacements():
            stack.enter_context(replaced(owner, {name: value}))
        stack.enter_context(_CudaDevices())
        yield notes


def _torch_cuda(capability: Capability, num_bytes: int, allocated_bytes: Callable[[], int]) -> dict[str, Any]:
    properties = SimpleNamespace(
        name="", major=capability[0], minor=capability[1], total_memory=num_bytes, multi_processor_count=1, warp_size=32
    )
    return {
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "initial_seed": torch.initial_seed,
        "memory_stats": lambda *_: {},
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **device_functions(num_bytes, allocated_bytes),
    }


def _replacements() -> list[tuple[Any, str, Any]]:
    """What replaces other attributes of torch, which takes an extension's device for one that can all that CUDA can."""
    backward, memory_format = getattr(*private.ENGINE), getattr(*dispatcher.CONVOLUTION_FORMAT)

    def backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        """``Tensor.backward`` takes the mode off, but recomputation runs the user's code."""
        with _CudaDevices():
            return backward(*args, **kwargs)

    def cudnn_format(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        """Channels last, in the result of a convolution, as soon as the input or the weight is."""
        if x.device.type != FAKE_GPU_TYPE:
            return memory_format(x, weight, backend)  # type: ignore[no-any-return]
        is_last = torch.float64 not in (x.dtype, weight.dtype) and (is_channels_last(x) or is_channels_last(weight))
        return CHANNELS_LAST[weight.dim()] if is_last else torch.contiguous_format

    return [
        *(
            (owner, name, (lambda: FAKE_GPU_TYPE) if is_function else FAKE_GPU_TYPE)
            for owner, name, is_function in dispatcher.BACKEND_NAMES
        ),
        (*dispatcher.INITIALISATION, True),  # or it would compute small constants there
        (*dispatcher.CONVOLUTION_FORMAT, cudnn_format),
        # no gradient is infinite
        (GradScaler, private.STEP_IF_FINITE, lambda _, optimizer, __, *args, **kwargs: optimizer.step(*args, **kwargs)),
        (GradScaler, "get_scale", private.first_scale_of),
        (*private.ENGINE, backward_in_mode),
        (torch, "Generator", _Generator),
    ]


class _CudaDevices(TorchFunctionMode):
    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func == _IS_CUDA:
            return args[0].device.type in ("cuda", FAKE_GPU_TYPE)
        if func is Tensor.cuda:
            return args[0].to(FAKE_GPU)
        if "device" in kwargs:
            kwargs["device"] = _card_for_cuda(kwargs["device"])
        if func is _PIN_MEMORY:
            return args[0].clone()
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            return made if Tensor.pin_memory is _PIN_MEMORY else made.pin_memory()  # somebody else takes a note
        if func is Tensor.to:
            args = tuple(map(_card_for_cuda, args))
        if func in _FROM_DATA and kwargs.get("device") is not None:  # as CUDA: made on the host, and copied
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _card_for_cuda(device: Any) -> Any:
    kind = device.type if isinstance(device, torch.device) else device
    is_cuda = kind == "cuda" or (isinstance(kind, str) and kind.startswith("cuda:"))
    return FAKE_GPU if is_cuda or (isinstance(device, int) and not isinstance(device, bool)) else device


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _HostGenerator)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _HostGenerator()


_HostGenerator = torch.Generator


class _Generator(metaclass=_AnyGenerator):
    """Makes generators of the host for any device: nothing is drawn from them."""
