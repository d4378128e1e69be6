"""Programs that say ``"cuda"`` mean the stand-in, and its tensors say that they are CUDA's."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_vram.memory.estimate.replaced import replaced
from lightning_vram.private_names.torch.autograd import ENGINE

_IS_CUDA = Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_PIN_MEMORY = Tensor.pin_memory
_FROM_DATA = (torch.tensor, torch.as_tensor)


@contextmanager
def cuda_devices(stand_in: torch.device) -> Iterator[None]:
    """Let ``"cuda"`` be another device, inside the block."""
    mode = _CudaDevices(stand_in)
    owner, name = ENGINE
    backward: Callable[..., Any] = getattr(owner, name)

    def backward_in_mode(*args: Any, **kwargs: Any) -> Any:
        """``Tensor.backward`` takes the mode off, but recomputation runs the user's code."""
        with _CudaDevices(stand_in):
            return backward(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(owner, {name: backward_in_mode}))
        stack.enter_context(replaced(torch, {"Generator": _Generator}))
        stack.enter_context(mode)
        yield


class _CudaDevices(TorchFunctionMode):
    def __init__(self, stand_in: torch.device) -> None:
        super().__init__()
        self._stand_in = stand_in

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func == _IS_CUDA:
            return args[0].device.type in ("cuda", self._stand_in.type)
        if func is Tensor.cuda:
            return args[0].to(self._stand_in)
        if "device" in kwargs:
            kwargs["device"] = self._device(kwargs["device"])
        if func is _PIN_MEMORY:
            return args[0].clone()
        if kwargs.pop("pin_memory", False):
            made = func(*args, **kwargs)
            return made if Tensor.pin_memory is _PIN_MEMORY else made.pin_memory()  # somebody else takes a note
        if func is Tensor.to:
            args = tuple(map(self._device, args))
        if func in _FROM_DATA and kwargs.get("device") is not None:  # as CUDA: made on the host, and copied
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)

    def _device(self, device: Any) -> Any:
        kind = device.type if isinstance(device, torch.device) else device
        is_cuda = kind == "cuda" or (isinstance(kind, str) and kind.startswith("cuda:"))
        return self._stand_in if is_cuda or (isinstance(device, int) and not isinstance(device, bool)) else device


class _AnyGenerator(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _HostGenerator)

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return _HostGenerator()


_HostGenerator = torch.Generator


class _Generator(metaclass=_AnyGenerator):
    """Makes generators of the host for any device: nothing is drawn from them."""
