"""A GPU you do not have: fake tensors whose backward runs on any machine, and a module like ``torch.cuda``.

Its device type is ``"lazy"``: autograd runs its backward in the calling thread, so no driver is needed (fake ``"cuda"``
tensors need one), and unlike ``"meta"`` it is no sign of a module that waits to be materialised. Queued work is done at
once. Also here: fake ranks.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain, cycle
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_vram.memory.estimate.fake_kernels import pad_packed_sequence
from lightning_vram.memory.estimate.known_values import (
    ARRAY,
    LIST,
    MAKERS,
    KnownValues,
    RecordedReads,
    one_hot,
    replaced,
)
from lightning_vram.memory.units import MIB
from lightning_vram.private_names import dispatcher
from lightning_vram.private_names.torch import FOREACH_TYPES, storage_key

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
    return {
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
        **dict.fromkeys(_NOTHING, lambda *_, **__: None),
        **dict.fromkeys(_BYTES, lambda *_, **__: allocated_bytes()),
    }


class FakeTensors:
    """Makes fakes of tensors; what shared a storage shares one again."""

    def __init__(self, mode: dispatcher.FakeTensorMode, device: torch.device) -> None:
        self._mode = mode
        self._device = device
        self._by_tensor: dict[int, tuple[Tensor, Tensor]] = {}  # with the real one, whose id must not be used again
        self._by_storage: dict[int, torch.UntypedStorage] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake of ``tensor``, the same at each call. A parameter gives a parameter."""
        if id(tensor) not in self._by_tensor:
            self._by_tensor[id(tensor)] = tensor, self._make(tensor)
        return self._by_tensor[id(tensor)][1]

    def _make(self, tensor: Any) -> Tensor:
        if isinstance(tensor, dispatcher.FakeTensor):
            return tensor
        if dispatcher.is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            return self._mode.from_tensor(tensor)
        key = storage_key(tensor.untyped_storage())
        made = fake_of(tensor, self._mode, self._device, self._by_storage.get(key))
        self._by_storage[key] = made.untyped_storage()
        return made


def fake_of(
    tensor: Tensor, mode: dispatcher.FakeTensorMode, device: torch.device, storage: torch.UntypedStorage | None = None
) -> Tensor:
    """Return a fake of ``tensor``, fake or not, which no operator has made: no tracker sees its birth."""
    with dispatcher.without_dispatch(), torch.no_grad():
        if storage is None:
            storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        elements = torch.empty(0, dtype=tensor.dtype, device="meta")
        elements.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    fake: Tensor = dispatcher.FakeTensor(mode, elements, device)
    if isinstance(tensor, nn.Parameter):
        with mode:
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


class FakeParameter(dispatcher.FakeTensor):
    """A fake tensor that is a parameter."""


@contextmanager
def foreach_takes_fakes() -> Iterator[None]:
    """Let optimizers and clipping work on many fakes at once, as they do on real ones: they go by the class."""
    fakes = [dispatcher.FakeTensor, FakeParameter]
    with ExitStack() as stack:
        for types in FOREACH_TYPES:
            types[:0] = fakes
            stack.callback(types.__delitem__, slice(len(fakes)))
        yield


def make_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``nn.Parameter.__new__`` is to be for parameters of fakes to be :class:`FakeParameter`."""

    def new(cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Any:  # noqa: FBT001, FBT002
        if not isinstance(data, dispatcher.FakeTensor):
            return original(cls, data, requires_grad)
        parameter: Any = data.detach().requires_grad_(requires_grad)
        parameter.__class__ = FakeParameter
        dispatcher.mark_parameter(parameter)
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


class UntouchedWeights(dispatcher.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Skip, in a ``with`` block, the first values of large tensors on the host: pages not written to take no memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.name().partition(".")[0]
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


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Let this process be rank 0 of ``num_ranks`` inside the block. Collectives send nothing."""

    def gather_same(objects: list[Any], value: Any, group: Any = None) -> None:
        objects[:] = [value] * len(objects)

    with ExitStack() as stack:
        backends = dist.Backend.default_device_backend_map
        backends[FAKE_GPU_TYPE] = dispatcher.BACKEND
        stack.callback(backends.pop, FAKE_GPU_TYPE)
        dispatcher.connect_fake_ranks(("cpu", FAKE_GPU_TYPE), num_ranks)
        stack.callback(dist.destroy_process_group)
        new_group, backend = dist.new_group, f"cpu:{dispatcher.BACKEND},{FAKE_GPU_TYPE}:{dispatcher.BACKEND}"
        functions: dict[str, Any] = {
            "new_group": lambda ranks=None, *_, **kwargs: new_group(ranks, **{**kwargs, "backend": backend}),
            **dict.fromkeys(("barrier", "broadcast_object_list"), lambda *_, **__: None),
            "all_gather_object": gather_same,
        }
        stack.enter_context(replaced(dist, functions))
        yield


HOST = torch.device("cpu")


@contextmanager
def fake_device(
    *,
    num_bytes: int,
    allocated_bytes: Callable[[], int],
    on_pin: Callable[[Tensor], None],
    reads: RecordedReads | None = None,
    shares_host_memory: bool = False,
) -> Iterator[tuple[dispatcher.FakeTensorMode, KnownValues]]:
    """Let tensors be fake, and a device of type :data:`KIND` exist; yields the mode, and what answers for values."""
    mode = dispatcher.QuickFakeMode(allow_non_fake_inputs=True)
    values = KnownValues(reads)
    with ExitStack() as stack:
        module = ModuleType(f"torch.{FAKE_GPU_TYPE}")
        vars(module).update(
            device_functions(num_bytes, allocated_bytes),
            get_device_properties=lambda *_: SimpleNamespace(is_integrated=shares_host_memory, total_memory=num_bytes),
            _is_in_bad_fork=lambda: False,
            is_bf16_supported=lambda *_, **__: True,
            get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        )
        dispatcher.set_device_module(FAKE_GPU_TYPE, module)
        stack.callback(dispatcher.remove_device_module, FAKE_GPU_TYPE)
        for owner, attributes in _replacements(module, values, on_pin):
            stack.enter_context(replaced(owner, attributes))
        stack.enter_context(foreach_takes_fakes())
        stack.enter_context(mode)
        stack.enter_context(values)
        yield mode, values


def _replacements(
    module: ModuleType, values: KnownValues, on_pin: Callable[[Tensor], None]
) -> list[tuple[Any, dict[str, Any]]]:
    def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
        on_pin(tensor)
        return tensor

    def read_all(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, **options: values.read_all(what, tensor, partial(original, **options))

    deep_copy: Any = Tensor.__deepcopy__

    def copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if not isinstance(tensor, dispatcher.FakeTensor):
            with dispatcher.without_dispatch():
                return deep_copy(tensor, memo)  # type: ignore[no-any-return]
        if id(tensor) not in memo:
            memo[id(tensor)] = copied = _copy_of(tensor)
            values.carry_over(tensor, copied)
        return memo[id(tensor)]  # type: ignore[no-any-return]

    of_tensors = {
        "__deepcopy__": copy,
        "data": property(_DATA.__get__, _set_data),
        "pin_memory": pin_memory,
        "is_pinned": lambda self, *_: False,
        "record_stream": lambda self, stream: None,
        "numpy": read_all(ARRAY, Tensor.numpy),
        # as tensors write their number unless they are fake
        "__format__": lambda self, spec: format(self.item() if self.dim() == 0 else str(self), spec),
        # a fake stays one: classes such as torchvision's ``Image`` add no memory
        "as_subclass": lambda self, kind: self if isinstance(self, dispatcher.FakeTensor) else _AS_SUBCLASS(self, kind),
    }
    huggingface: Any = sys.modules.get("transformers.utils.import_utils")
    asks_for_values = {"is_fake_tensor": values.is_unknown} if hasattr(huggingface, "is_fake_tensor") else {}
    return [
        (huggingface, asks_for_values),  # it takes other paths with masks that it cannot look at
        (torch.accelerator, {"current_stream": module.current_stream, "current_device_index": module.current_device}),
        (torch.accelerator, {"synchronize": module.synchronize}),
        (torch, {"Stream": FinishedStream, "Event": FinishedEvent, **MAKERS}),
        (torch.utils, {"swap_tensors": dispatcher.swap_contents}),
        (nn.Parameter, {"__new__": make_parameter(nn.Parameter.__new__)}),
        (Tensor, of_tensors),
        (functional, {"one_hot": one_hot}),
        (dispatcher.RECURRENT_FUNCTIONS, {"_pad_packed_sequence": pad_packed_sequence}),
        (dispatcher.FakeTensor, {"tolist": read_all(LIST, Tensor.tolist)}),
    ]


_AS_SUBCLASS: Any = Tensor.as_subclass
_DATA: Any = Tensor.data  # of a base of it: what is put in its place here is taken away again


def _copy_of(tensor: dispatcher.FakeTensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):  # as its own method does
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    if tensor.device.type == FAKE_GPU_TYPE:  # the copy of a storage is made by no operator, but takes memory
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    tensor.new_empty([])  # the one operator of a real copy
    return fake_of(tensor, tensor.fake_mode, tensor.device)


def _set_data(tensor: Tensor, values: Tensor) -> None:
    if not isinstance(tensor, dispatcher.FakeTensor) or tensor.device == values.device:
        _DATA.__set__(tensor, values)
        return
    moved = values.detach()  # to autograd, tensors of other devices are of other kinds
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    dispatcher.swap_contents(tensor, moved.requires_grad_(tensor.requires_grad))
