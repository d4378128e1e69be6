"""Tensor subclasses (``__torch_function__``) for weights that are stored in 8 or 4 bits.

A layer's ``forward`` dequantizes the weight, and its backward again: gradients are those of a layer with these numbers.
Other reads get a dequantized copy; writes are errors. Code of PyTorch for modules, compilers and distributed training
sees the bytes, as ours does: it moves, saves, loads and shards them.
"""

import sys
from collections.abc import Callable, Container, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import FrameType, GetSetDescriptorType
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_vram.core.hooks import RecomputableTensors, is_transformed
from lightning_vram.core.tensors.properties import add_parameter_class, while_plain
from lightning_vram.private_names import torch as private
from lightning_vram.private_names.fsdp2 import shard_like
from lightning_vram.techniques.quantize_frozen_weights.packing import Library, Packing

DTYPE = "_quantized_weight_dtype"
"""Name of an empty buffer, which follows the module to devices and dtypes."""
LOADING = "_quantized_weight_loading"
"""Name of the attribute with the handle of the hook that quantizes weights which the layer loads."""

NO_MEMORY = torch.empty(0, dtype=torch.uint8)

_INPUTS: dict[Callable[..., Any], tuple[int, str]] = {  # where the input of a layer is among the arguments
    F.linear: (0, "input"),
    torch.conv1d: (0, "input"),
    torch.conv2d: (0, "input"),
    torch.conv3d: (0, "input"),
    torch.addmm: (1, "mat1"),  # Conv1D of transformers
    F.embedding: (0, "input"),
}
_COMPILERS = "torch._"
_SEE_BYTES = ("torch.nn.modules.module", "torch.nn.parallel", "torch.distributed", "torch.autograd", "lightning_vram.")
_REPLACE = {f"torch.nn.utils.{name}" for name in ("parametrize", "prune", "spectral_norm", "weight_norm")}
_WATCHED = "lightning_vram.techniques.sharding.parameter"
_FOR_CALLERS = ("_linalg_utils", "_lobpcg", "_lowrank", "_tensor", "overrides", "nn.parameter")
_BETWEEN = {__name__, _WATCHED, *(f"torch.{name}" for name in _FOR_CALLERS)}
_OF_SHAPE = {
    *("shape", "size", "ndim", "dim", "ndimension", "numel", "nelement", "stride", "dtype", "itemsize", "element_size"),
    *("is_floating_point", "is_complex", "is_contiguous", "__len__"),
}
_PROPERTIES = {
    name for kind in Tensor.__mro__ for name, one in vars(kind).items() if isinstance(one, GetSetDescriptorType)
}
_OF_MEMORY = {*_PROPERTIES, "data_ptr", "untyped_storage"} - {"T", "mT", "H", "mH", "real", "imag"}
_ITSELF = {"data", "detach"}  # of a copy, writes would be lost in silence


@dataclass(eq=False)
class Form:
    """What is known of a quantized weight apart from its bytes."""

    name: str  # of the layer, for messages
    packing: Packing
    shape: torch.Size
    buffers: dict[str, Tensor | None]  # of the layer; DTYPE is one of them
    library: Library = "own"
    read_as: torch.dtype | None = None  # set while ordinary weights are cast to another dtype

    @property
    def own_dtype(self) -> torch.dtype:
        """That of the original weight, or of a later ``module.to(dtype)``."""
        carrier = self.buffers[DTYPE]
        assert carrier is not None
        return carrier.dtype

    @property
    def dtype(self) -> torch.dtype:
        """That of an ordinary weight in its place."""
        return self.read_as or self.own_dtype


class QuantizedWeight(nn.Parameter):
    """The attribute ``weight`` of a layer, without memory: the layer's parameter of that name has the bytes."""

    form: Form
    parameters: dict[str, Tensor | None]  # not the layer: a reference cycle; copies of the layer copy them
    as_bytes_for: tuple[str, ...] = (_COMPILERS,)

    @property
    def held(self) -> Tensor:
        """The parameter that has the bytes: FSDP2 replaces it."""
        held = self.parameters["weight"]
        assert held is not None
        return held

    @property
    def packed(self) -> Tensor:
        """The bytes, uint8, [num_blocks, row_bytes]."""
        held = self.held
        if not isinstance(held, QuantizedWeight):
            return held
        with private.without_torch_function():
            return Tensor.detach(held)  # not that of a subclass

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has a part of the bytes, as with FSDP2 while the layer does not compute."""
        return isinstance(self.held, DTensor)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight as a new tensor. A collective while it is sharded."""
        packed, form = self.packed, self.form
        if isinstance(packed, DTensor):
            packed = packed.full_tensor()
        if packed.is_floating_point():  # put there by ``torch.func.functional_call``
            return packed.to(dtype or form.dtype)
        return form.packing.decode(packed, form.shape.numel(), dtype or form.dtype, form.library).view(form.shape)

    def look_up(self, indices: Tensor) -> Tensor:
        """Return rows of a weight of two dimensions, [*indices.shape, shape[1]]; only they are dequantized."""
        form, packed = self.form, self.packed
        num_rows, width = form.shape
        if width % form.packing.block_size or packed.is_floating_point():
            return F.embedding(indices, self.dequantize())
        rows = packed.view(num_rows, -1).index_select(0, indices.reshape(-1)).view(-1, form.packing.row_bytes)
        return form.packing.decode(rows, indices.numel() * width, form.dtype, form.library).view(*indices.shape, width)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Dequantize where a layer computes; elsewhere see :func:`_read`."""
        kwargs = kwargs or {}
        place, name = _INPUTS.get(func, (len(args), ""))
        input = args[place] if len(args) > place else kwargs.get(name)
        found = [one for one in (*args, *kwargs.values()) if isinstance(one, QuantizedWeight)]
        if len(found) != 1 or not isinstance(input, Tensor) or input is found[0] or kwargs.get("out") is not None:
            return _read(func, args, kwargs)
        return found[0].look_up(input) if func is F.embedding else found[0]._compute(func, input, args, kwargs)

    def read(self) -> Tensor:
        """Return the ordinary weight in its place."""
        return self.dequantize()

    def hides(self, parameter: Any) -> None:
        """Let a shard or all-gathered parameter of FSDP2 read as the weight, too."""
        kind = _KINDS.get(type(parameter))
        if kind is not None:
            parameter.__class__ = kind
            vars(parameter)["form"] = self.form

    def refuse(self, writer: str) -> NoReturn:
        """Raise: ``writer`` would change the weight."""
        raise RuntimeError(
            f"the weight of {self.form.name!r} is quantized to {self.form.packing.bits} bits, and {writer!r} would "
            "change it: call dequantize_frozen_weights(model) first, or exclude the layer with layers=."
        )

    def _compute(self, func: Callable[..., Any], input: Tensor, args: Any, kwargs: Mapping[str, Any]) -> Any:
        kind, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(kind) and dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(kind)

        def call() -> Any:
            return _call_with(lambda weight: weight.dequantize(dtype), func, args, kwargs)

        if torch.compiler.is_compiling():  # the compiler recomputes what is checkpointed
            return torch.utils.checkpoint.checkpoint(call, use_reentrant=False, preserve_rng_state=False)
        if not (torch.is_grad_enabled() and input.requires_grad) or is_transformed() or not private.may_set_hooks():
            return call()
        saves = RecomputableTensors()
        weight = saves.add(self.dequantize(dtype), partial(self.dequantize, dtype))
        with saves.hooks():
            return _call_with(lambda _: weight, func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), make_weight(type(self), self._memory().clone(), deepcopy(vars(self), memo)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return make_weight, (type(self), self._memory(), vars(self))

    def _memory(self) -> Tensor:
        with private.without_torch_function():
            return self.detach()


class QuantizedParameter(QuantizedWeight):
    """The parameter ``weight`` of a layer, whose memory is the bytes. It has no reference to the layer."""

    as_bytes_for = (_COMPILERS, *_SEE_BYTES)

    @property
    def held(self) -> Tensor:
        """Itself."""
        return self


def _reading(method: Any) -> Any:
    """Return a method of a shard as that of any shard."""
    return lambda self, *args, **kwargs: _read(method, (self, *args), kwargs)


class QuantizedShard(QuantizedParameter, DTensor):
    """The parameter while FSDP2 shards it: reads as the dequantized weight, sharded in the same way."""

    @override
    def read(self) -> Tensor:
        return shard_like(self.dequantize(), self)

    # Methods that read or move the local shard without __torch_function__.
    full_tensor, to_local, redistribute = map(_reading, (DTensor.full_tensor, DTensor.to_local, DTensor.redistribute))

    @override
    def detach(self) -> Any:
        """As that of any shard; ``nn.Parameter``, called by ``module.to()``, requires one of the same class."""
        alias = _read(Tensor.detach, (self,), {})
        if sys._getframe(1).f_globals.get("__name__") == nn.Parameter.__module__:
            self.hides(alias)
        return alias

    def __repr__(self) -> str:  # type: ignore[override]
        """Return a text without values, which one rank alone does not have."""
        form = self.form
        return f"{type(self).__name__}({form.name!r}, {tuple(form.shape)}, {form.dtype}, {form.packing.bits} bits)"

    # Copies and files hold ordinary DTensors.
    def __deepcopy__(self, memo: Any) -> Any:
        return while_plain(self, DTensor, lambda: self.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return while_plain(self, DTensor, lambda: self.__reduce_ex__(protocol))


add_parameter_class(QuantizedParameter)
_KINDS: dict[type, type[QuantizedParameter]] = {DTensor: QuantizedShard, nn.Parameter: QuantizedParameter}


def make_weight(kind: type[QuantizedWeight], memory: Tensor, known: dict[str, Any]) -> Any:
    """Return a weight of class ``kind`` with ``memory`` and attributes ``known``."""
    weight = kind(memory, requires_grad=False)  # of a fake tensor: what an estimate has for any parameter
    vars(weight).update(known)
    return weight


def quantized_weight(layer: nn.Module) -> QuantizedWeight | None:
    """Return the weight of a layer if it is quantized."""
    weight = vars(layer).get("weight", private.own_parameters(layer).get("weight"))
    return weight if isinstance(weight, QuantizedWeight) else None


def read_weights_as(model: nn.Module, dtype: torch.dtype, skip: Container[nn.Module] = ()) -> Callable[[], None]:
    """Let quantized weights of ``model`` read as ``dtype``, except those of modules in ``skip``; return the undo."""
    forms = [one.form for part in model.modules() if part not in skip and (one := quantized_weight(part)) is not None]

    def set_all(dtype: torch.dtype | None) -> None:
        for form in forms:
            form.read_as = dtype

    set_all(dtype)
    return partial(set_all, None)


def _read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function other than a layer's on what it needs of the weight: bytes, shape, memory or values."""
    weight = next(leaf for leaf in private.tree_leaves((args, kwargs)) if isinstance(leaf, QuantizedWeight))
    name, is_set = _name_of(func)
    if name == "requires_grad_" or (name == "requires_grad" and is_set):
        return weight if False in (*args[1:], *kwargs.values()) else weight.refuse(name)
    asker = "" if torch.compiler.is_dynamo_compiling() else _asker()
    if asker.startswith(weight.as_bytes_for):
        with private.without_torch_function():
            return func(*args, **kwargs)
    if asker in _REPLACE:
        weight.refuse(asker)
    if name in _ITSELF and not is_set:
        return weight
    if (is_set and name != "grad") or _writes(name, args, kwargs):
        weight.refuse(name)
    if name in _OF_SHAPE:
        return _call_with(
            lambda weight: torch.empty(weight.form.shape, dtype=weight.form.dtype, device="meta"), func, args, kwargs
        )
    if name in _OF_MEMORY:
        with private.without_torch_function():
            return _call_with(lambda weight: weight.held, func, args, kwargs)
    return _call_with(lambda weight: weight.read(), func, args, kwargs)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # Dynamo has no names of methods
def _name_of(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return the name of a function, or of the attribute that it reads or sets, and whether it sets it."""
    name = func.__name__
    owner = func.__self__ if name in ("__get__", "__set__") else func  # type: ignore[attr-defined]
    return getattr(owner, "__name__", name), name == "__set__"


def _asker() -> str:
    """Return the name of the Python module whose code reads a weight."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def _writes(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function writes to a weight in its first argument, or in ``out``."""
    is_in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace")
    target = (args[:1] or list(kwargs.values())) if is_in_place else kwargs.get("out")
    return any(isinstance(leaf, QuantizedWeight) for leaf in private.tree_leaves(target))


def _call_with(
    read: Callable[[QuantizedWeight], Tensor], func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    args, kwargs = private.tree_map_only(QuantizedWeight, read, (args, dict(kwargs)))
    return func(*args, **kwargs)
