"""Run a program for CUDA on fake tensors: it uses the memory that it would use on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_vram.memory.estimate.cuda_semantics.attention import Capability
from lightning_vram.memory.estimate.cuda_semantics.autocast import cuda_autocast
from lightning_vram.memory.estimate.cuda_semantics.kernels import CHANNELS_LAST, is_channels_last, kernels_of
from lightning_vram.memory.estimate.fakes.device_module import CARD, KIND, device_functions
from lightning_vram.memory.estimate.replaced import replaced
from lightning_vram.private_names.cuda.backends import BACKEND_NAMES, CONVOLUTION_FORMAT, INITIALISATION
from lightning_vram.private_names.cuda.dispatch_keys import BEHIND_AUTOCAST, kernels_at
from lightning_vram.private_names.torch.autocast import STEP_IF_FINITE, first_scale_of
from lightning_vram.private_names.torch.autograd import ENGINE

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
        stack.enter_context(kernels_at(BEHIND_AUTOCAST, kernels_of(capability, notes)))
        for owner, name, value in _replacements():
            stack.enter_context(replaced(owner, {name: value}))
        stack.enter_context(_CudaDevices())
        yield notes


def _torch_cuda(capability: Capability, num_bytes: int, allocated_bytes: Callable[[], int]) -> dict[str, Any]:
    major, minor = capability
    properties = SimpleNamespace(
        name="", major=major, minor=minor, total_memory=num_bytes, multi_processor_count=1, warp_size=32
    )
    functions: dict[str, Any] = {
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_rng_state_all": lambda: [torch.default_generator.get_state()],
        "initial_seed": torch.initial_seed,
        "memory_stats": lambda *_: {},
    }
    functions |= {name: lambda *_, **__: None for name in _NOTHING}
    return functions | device_functions(num_bytes, allocated_bytes)


def _replacements() -> list[tuple[Any, str, Any]]:
    """What replaces other attributes of torch, which takes an extension's device for one that can all that CUDA can."""
    backward, memory_format = getattr(*ENGINE), getattr(*CONVOLUTION_FORMAT)

    def backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        """``Tensor.backward`` takes the mode off, but recomputation runs the user's code."""
        with _CudaDevices():
            return backward(*args, **kwargs)

    def cudnn_format(x: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
        """Channels last, in the result of a convolution, as soon as the input or the weight is."""
        if x.device.type != KIND:
            return memory_format(x, weight, backend)  # type: ignore[no-any-return]
        is_last = torch.float64 not in (x.dtype, weight.dtype) and (is_channels_last(x) or is_channels_last(weight))
        return CHANNELS_LAST[weight.dim()] if is_last else torch.contiguous_format

    return [
        *((owner, name, (lambda: KIND) if is_function else KIND) for owner, name, is_function in BACKEND_NAMES),
        (*INITIALISATION, True),  # or it would compute small constants there
        (*CONVOLUTION_FORMAT, cudnn_format),
        # no gradient is infinite
        (GradScaler, STEP_IF_FINITE, lambda self, optimizer, state, *args, **kwargs: optimizer.step(*args, **kwargs)),
        (GradScaler, "get_scale", first_scale_of),
        (*ENGINE, backward_in_mode),
        (torch, "Generator", _Generator),
    ]


class _CudaDevices(TorchFunctionMode):
    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func == _IS_CUDA:
            return args[0].device.type in ("cuda", KIND)
        if func is Tensor.cuda:
            return args[0].to(CARD)
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
    return CARD if is_cuda or (isinstance(device, int) and not isinstance(device, bool)) else device


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _HostGenerator)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _HostGenerator()


_HostGenerator = torch.Generator


class _Generator(metaclass=_AnyGenerator):
    """Makes generators of the host for any device: nothing is drawn from them."""
