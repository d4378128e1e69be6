"""A GPU you do not have: fake tensors whose backward runs on any machine, and a module like ``torch.cuda``.

Its device type is ``"lazy"``: autograd runs its backward in the calling thread, so no driver is needed (fake ``"cuda"``
tensors need one), and unlike ``"meta"`` it is no sign of a module that waits to be materialised. Queued work is done at
once, so copies keep up with the computation.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_vram.memory.estimate.fakes.device_module import KIND, FinishedEvent, FinishedStream, device_functions
from lightning_vram.memory.estimate.fakes.host_kernels import HostKernels
from lightning_vram.memory.estimate.fakes.kernels import pad_packed_sequence
from lightning_vram.memory.estimate.fakes.known_values import KnownValues
from lightning_vram.memory.estimate.fakes.recorded_reads import ARRAY, LIST, MAKERS, RecordedReads, one_hot
from lightning_vram.memory.estimate.fakes.tensors import fake_of, make_parameter, taken_together
from lightning_vram.memory.estimate.replaced import replaced
from lightning_vram.private_names.torch.dispatch import FakeTensor, FakeTensorMode, QuickFakeMode, without_dispatch
from lightning_vram.private_names.torch.fakes import (
    RECURRENT_FUNCTIONS,
    remove_device_module,
    set_device_module,
    swap_contents,
)

HOST = torch.device("cpu")


@contextmanager
def fake_device(
    *,
    num_bytes: int,
    allocated_bytes: Callable[[], int],
    on_pin: Callable[[Tensor], None],
    reads: RecordedReads | None = None,
) -> Iterator[tuple[FakeTensorMode, KnownValues]]:
    """Let tensors be fake, and a device of type :data:`KIND` exist; yields the mode, and what answers for values."""
    mode = QuickFakeMode(allow_non_fake_inputs=True)
    values = KnownValues(reads)
    with ExitStack() as stack:
        module = _device_module(num_bytes, allocated_bytes)
        set_device_module(KIND, module)
        stack.callback(remove_device_module, KIND)
        for owner, attributes in _replacements(module, values, on_pin):
            stack.enter_context(replaced(owner, attributes))
        stack.enter_context(taken_together())
        stack.enter_context(mode)
        stack.enter_context(values)
        stack.enter_context(HostKernels())  # type: ignore[no-untyped-call]
        yield mode, values


def _replacements(
    module: ModuleType, values: KnownValues, on_pin: Callable[[Tensor], None]
) -> list[tuple[Any, dict[str, Any]]]:
    accelerator = {
        "current_stream": module.current_stream,
        "synchronize": module.synchronize,
        "current_device_index": module.current_device,
    }
    of_tensors = {
        "__deepcopy__": _deep_copy(Tensor.__deepcopy__, values),
        "data": property(_DATA.__get__, _set_data),
        "pin_memory": _pin(on_pin),
        "is_pinned": lambda self, *_: False,
        "record_stream": lambda self, stream: None,
        "numpy": _read_all(ARRAY, Tensor.numpy, values),
        "__format__": _format,
        "as_subclass": _as_subclass,
    }
    huggingface: Any = sys.modules.get("transformers.utils.import_utils")
    asks_for_values = {"is_fake_tensor": values.is_unknown} if hasattr(huggingface, "is_fake_tensor") else {}
    return [
        (huggingface, asks_for_values),  # it takes other paths with masks that it cannot look at
        (torch.accelerator, accelerator),
        (torch, {"Stream": FinishedStream, "Event": FinishedEvent, **MAKERS}),
        (torch.utils, {"swap_tensors": swap_contents}),
        (nn.Parameter, {"__new__": make_parameter(nn.Parameter.__new__)}),
        (Tensor, of_tensors),
        (functional, {"one_hot": one_hot}),
        (RECURRENT_FUNCTIONS, {"_pad_packed_sequence": pad_packed_sequence}),
        (FakeTensor, {"tolist": _read_all(LIST, Tensor.tolist, values)}),
    ]


_AS_SUBCLASS: Any = Tensor.as_subclass
_DATA: Any = Tensor.data  # of a base of it: what is put in its place here is taken away again
_Copy = Callable[[Tensor, dict[int, Any]], Tensor]


def _deep_copy(original: _Copy, values: KnownValues) -> _Copy:
    def copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            with without_dispatch():
                return original(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = copied = _copy_of(tensor)
            values.carry_over(tensor, copied)
        return memo[id(tensor)]  # type: ignore[no-any-return]

    return copy


def _read_all(what: str, original: Callable[..., Any], values: KnownValues) -> Callable[..., Any]:
    def read(tensor: Tensor, **options: Any) -> Any:
        return values.read_all(what, tensor, partial(original, **options))

    return read


def _as_subclass(tensor: Tensor, kind: type) -> Tensor:
    """A fake stays one: classes such as torchvision's ``Image`` add no memory."""
    return tensor if isinstance(tensor, FakeTensor) else _AS_SUBCLASS(tensor, kind)


def _format(tensor: Tensor, spec: str) -> str:
    """Write the number of a tensor that has one, as tensors themselves do unless they are fake."""
    return format(tensor.item() if tensor.dim() == 0 else str(tensor), spec)


def _pin(on_pin: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
        on_pin(tensor)
        return tensor

    return pin_memory


def _copy_of(tensor: FakeTensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):  # as its own method does
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    if tensor.device.type == KIND:  # the copy of a storage is made by no operator, but takes memory
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    tensor.new_empty([])  # the one operator of a real copy
    return fake_of(tensor, tensor.fake_mode, tensor.device)


def _set_data(tensor: Tensor, values: Tensor) -> None:
    if not isinstance(tensor, FakeTensor) or tensor.device == values.device:
        _DATA.__set__(tensor, values)
        return
    is_parameter, requires_grad = isinstance(tensor, torch.nn.Parameter), tensor.requires_grad
    moved = values.detach()  # to autograd, tensors of different devices are of different kinds
    if is_parameter:
        moved = torch.nn.Parameter(moved, requires_grad=requires_grad)
    swap_contents(tensor, moved.requires_grad_(requires_grad))


def _device_module(num_bytes: int, allocated_bytes: Callable[[], int]) -> ModuleType:
    module = ModuleType(f"torch.{KIND}")
    vars(module).update(
        device_functions(num_bytes, allocated_bytes),
        _is_in_bad_fork=lambda: False,
        is_bf16_supported=lambda *_, **__: True,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module
