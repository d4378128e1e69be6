"""A GPU and ranks you do not have: fake tensors whose programs run to the end on any machine."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain, cycle
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.memory.units import MIB
from lightning_vram.private_names.dispatcher import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    mark_parameter,
    without_dispatch,
)
from lightning_vram.private_names.torch import FOREACH_TYPES, storage_key


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Patch attributes of a module or class inside the block; missing ones are added."""
    with ExitStack() as stack:
        for name, value in values.items():
            before = vars(owner).get(name)
            stack.callback(delattr, owner, name) if before is None else stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)
        yield


FAKE_GPU_TYPE = "lazy"
FAKE_GPU = torch.device(FAKE_GPU_TYPE, 0)

_NOTHING = (
    *("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "set_rng_state"),
    "reset_peak_memory_stats",
)
_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class FinishedEvent:
    """An event that has always happened."""

    device = FAKE_GPU
    device_index = 0
    device_type = 17  # of a lazy device: c10/core/DeviceType.h

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    synchronize = wait = record = _nothing

    def query(self) -> bool:
        """All is done."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """No time."""
        return 0.0


class FinishedStream(FinishedEvent):
    """A stream that has always done what it was given. What is made on it comes from blocks of its own."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id = self.cuda_stream = next(_ids)

    def __enter__(self) -> "FinishedStream":
        _entered.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _entered.pop()

    wait_stream = wait_event = FinishedEvent._nothing

    def record_event(self, event: Any = None) -> Any:
        """The event, or a new one."""
        return event or FinishedEvent()

    def is_capturing(self) -> bool:
        """No graph is captured."""
        return False


_POOL = 32  # as many streams a card has, which are given out in turn: c10/cuda/CUDAStream.cpp
_ids = chain([0], cycle(range(1, _POOL + 1)))
_entered: list[FinishedStream] = []
_default = FinishedStream()


def device_functions(num_bytes: int, allocated_bytes: Callable[[], int]) -> dict[str, Any]:
    """Return the functions and classes that modules of devices have in common, by their names there."""
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "mem_get_info": lambda *_, **__: (max(0, num_bytes - allocated_bytes()), num_bytes),
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "Stream": FinishedStream,
        "Event": FinishedEvent,
        "stream": lambda stream: stream or nullcontext(),
        "current_stream": lambda *_: _entered[-1] if _entered else _default,
        "default_stream": lambda *_: _default,
    }
    functions |= {name: lambda *_, **__: None for name in _NOTHING}
    return functions | {name: lambda *_, **__: allocated_bytes() for name in _BYTES}


_Copied = TypeVar("_Copied")


class FakeTensors:
    """Makes fakes of tensors; what shared a storage shares one again."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._by_tensor: dict[int, tuple[Tensor, Tensor]] = {}  # with the real one, whose id must not be used again
        self._by_storage: dict[int, torch.UntypedStorage] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake of ``tensor``, the same at each call. A parameter gives a parameter."""
        if id(tensor) not in self._by_tensor:
            self._by_tensor[id(tensor)] = tensor, self._make(tensor)
        return self._by_tensor[id(tensor)][1]

    def copy_of(self, nest: _Copied, tensors: Iterable[Tensor]) -> _Copied:
        """Copy an object deeply, with fakes in the place of ``tensors``."""
        memo: dict[int, Any] = {id(tensor): self.fake(tensor) for tensor in tensors}
        return copy.deepcopy(nest, memo)

    def _make(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        wrapper: Any = tensor
        if is_traceable_wrapper_subclass(wrapper) or tensor.layout is not torch.strided:
            return self._mode.from_tensor(tensor)
        storage = tensor.untyped_storage()
        shared = self._by_storage.get(storage_key(storage))
        made = fake_of(tensor, self._mode, self._device, shared)
        self._by_storage[storage_key(storage)] = made.untyped_storage()
        return made


def fake_of(
    tensor: Tensor, mode: FakeTensorMode, device: torch.device, storage: torch.UntypedStorage | None = None
) -> Tensor:
    """Return a fake of ``tensor``, fake or not, which no operator has made: no tracker sees its birth."""
    with without_dispatch(), torch.no_grad():
        if storage is None:
            storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        elements = torch.empty(0, dtype=tensor.dtype, device="meta")
        elements.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    fake: Tensor = FakeTensor(mode, elements, device)
    if isinstance(tensor, nn.Parameter):
        with mode:
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


class FakeParameter(FakeTensor):
    """A fake tensor that is a parameter."""


@contextmanager
def foreach_takes_fakes() -> Iterator[None]:
    """Let optimizers and clipping work on many fakes at once, as they do on real ones: they go by the class."""
    fakes = [FakeTensor, FakeParameter]
    with ExitStack() as stack:
        for types in FOREACH_TYPES:
            types[:0] = fakes
            stack.callback(types.__delitem__, slice(len(fakes)))
        yield


def make_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``nn.Parameter.__new__`` is to be for parameters of fakes to be :class:`FakeParameter`."""

    def new(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002
        if not isinstance(data, FakeTensor):
            return original(cls, data, requires_grad)
        parameter: Any = data.detach().requires_grad_(requires_grad)
        parameter.__class__ = FakeParameter
        mark_parameter(parameter)
        return parameter

    return new


_MIN_BYTES = MIB
# What torch.nn.init and its like write with.
_WRITES = frozenset(
    f"aten::{name}_"
    for name in ("normal", "uniform", "fill", "zero", "copy", "erfinv", "mul", "add", "clamp", "random")
)
_DRAWS = frozenset({"aten::randn", "aten::rand"})
_CLONE = "aten::clone"


class UntouchedWeights(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skip, in a ``with`` block, the first values of large tensors on the host: pages not written to take no memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.name().partition(".")[0]  # type: ignore[attr-defined]  # an operator
        if name in _WRITES and _is_large(args[0]):
            return args[0]
        if name == _CLONE and _is_large(args[0]):
            return torch.empty_like(args[0], **kwargs)
        if name in _DRAWS:
            empty = torch.empty(args[0], **{key: value for key, value in kwargs.items() if key != "generator"})
            if _is_large(empty):
                return empty
        return func(*args, **kwargs)


def _is_large(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() >= _MIN_BYTES
