"""What a layer has for its weight while the weight is kept in 8 or 4 bits.

A layer's ``forward`` hands its weight to one function of torch. If that is no tensor, torch asks it what to do
(``__torch_function__``). So the layer, its class, its hooks and who wraps it stay what they are. The weight is decoded
for the call, and again in the backward: the same numbers, so gradients are those of a plain layer that has them.
"""

from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.hooks.moment import is_transformed
from lightning_vram.core.hooks.remade_saves import RemadeSaves
from lightning_vram.private_names.torch.autograd import may_set_hooks
from lightning_vram.private_names.torch.modules import own_buffers, own_parameters
from lightning_vram.techniques.quantize_frozen_weights.libraries import Library
from lightning_vram.techniques.quantize_frozen_weights.packing import Packing

DTYPE = "_quantized_weight_dtype"
"""Name of an empty buffer, which follows the module to devices and dtypes."""

_INPUTS: dict[Callable[..., Any], tuple[int, str]] = {  # where the input of a layer is among the arguments
    F.linear: (0, "input"),
    torch.conv1d: (0, "input"),
    torch.conv2d: (0, "input"),
    torch.conv3d: (0, "input"),
    torch.addmm: (1, "mat1"),  # Conv1D of transformers
    F.embedding: (0, "input"),
}
_HAS_NO_AUTOCAST = F.embedding


class WeightReadError(AttributeError, RuntimeError):
    """A weight that is kept in few bits was read elsewhere than in its layer."""


class QuantizedWeight:
    """The weight of ``layer``, whose bytes are the parameter of that name.

    Args:
        layer: Whose parameter ``weight`` are packed bytes.
        name: Of the layer, for messages.
        packing: Of the bytes.
        shape: Of the weight.
        loading: The hook that encodes what the layer is given.
    """

    __slots__ = ("_buffers", "_parameters", "library", "loading", "name", "packing", "read_as", "shape")
    requires_grad = False
    grad = None
    is_leaf = True

    def __init__(
        self, layer: nn.Module, name: str, packing: Packing, shape: torch.Size, loading: RemovableHandle
    ) -> None:
        # not the layer, which would hold itself; both follow it in copies
        self._parameters, self._buffers = own_parameters(layer), own_buffers(layer)
        self.name, self.packing, self.shape, self.loading = name, packing, shape, loading
        self.library: Library = "own"
        """Whose kernels decode."""
        self.read_as: torch.dtype | None = None
        """Set for the time in which somebody keeps plain weights in another dtype."""

    @property
    def packed(self) -> Tensor:
        """The bytes, uint8, [num_blocks, row_bytes]."""
        packed = self._parameters["weight"]
        assert packed is not None
        return packed

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has a part of the bytes, as FSDP2 leaves them while the layer does not compute."""
        return isinstance(self.packed, DTensor)

    @property
    def own_dtype(self) -> torch.dtype:
        """What the weight had, or ``module.to(dtype)`` would have given it."""
        carrier = self._buffers[DTYPE]
        assert carrier is not None
        return carrier.dtype

    @property
    def dtype(self) -> torch.dtype:
        """What a plain weight would have."""
        return self.read_as or self.own_dtype

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.packed.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its numbers."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return how many numbers it has."""
        return self.shape.numel()

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight, in memory of its own. A collective where it is sharded, and its layer is not computing."""
        packed = self.packed
        if isinstance(packed, DTensor):
            packed = packed.full_tensor()
        return self.packing.decode(packed, self.numel(), dtype or self.dtype, self.library).view(self.shape)

    def look_up(self, indices: Tensor) -> Tensor:
        """Return rows, of a weight of two dimensions, [*indices.shape, shape[1]]; only they are decoded."""
        num_rows, width = self.shape
        if width % self.packing.block_size:
            return F.embedding(indices, self.dequantize())
        rows = self.packed.view(num_rows, -1).index_select(0, indices.reshape(-1)).view(-1, self.packing.row_bytes)
        numbers = self.packing.decode(rows, indices.numel() * width, self.dtype, self.library)
        return numbers.view(*indices.shape, width)

    def __getitem__(self, key: Any) -> Tensor:
        """Return rows of an embedding, as some classes read them in their own ``forward``."""
        if isinstance(key, tuple) or self.ndim != 2:
            self.refuse("__getitem__")
        return self.look_up(torch.arange(self.shape[0], device=self.device)[key])

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Be the weight where a layer computes with it; refuse everything else."""
        kwargs = kwargs or {}
        found = [one for one in (*args, *kwargs.values()) if isinstance(one, cls)]
        place, name = _INPUTS.get(func, (0, ""))
        input = args[place] if len(args) > place else kwargs.get(name)
        if func not in _INPUTS or len(found) != 1 or not isinstance(input, Tensor):
            (found or [_any_of(cls, args, kwargs)])[0].refuse(getattr(func, "__name__", "a function"))
        (weight,) = found
        if func is F.embedding:
            return weight.look_up(input)
        return weight._compute(func, input, args, kwargs)

    def refuse(self, reader: str) -> NoReturn:
        """Raise the error of a weight that ``reader`` reads."""
        raise WeightReadError(
            f"the weight of {self.name!r} is kept in {self.packing.bits} bits, and {reader!r} reads it elsewhere than "
            f"in its layer: read {self.name}.weight.dequantize() there, or name other layers in layers=."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # what copies and pickles ask for
        self.refuse(name)

    def _compute(
        self, func: Callable[..., Any], input: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        dtype = _computing_dtype(input)
        if torch.compiler.is_compiling():  # the compiler makes again what is marked so
            return torch.utils.checkpoint.checkpoint(
                self._call, func, dtype, args, dict(kwargs), use_reentrant=False, preserve_rng_state=False
            )
        if not (torch.is_grad_enabled() and input.requires_grad) or is_transformed() or not may_set_hooks():
            return self._call(func, dtype, args, kwargs)
        saves = RemadeSaves()
        weight = saves.add(self.dequantize(dtype), partial(self.dequantize, dtype))
        with saves.hooks():
            return _call_with(weight, func, args, kwargs)

    def _call(
        self, func: Callable[..., Any], dtype: torch.dtype, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return _call_with(self.dequantize(dtype), func, args, kwargs)


def quantized_weight(layer: nn.Module) -> QuantizedWeight | None:
    """Return the weight of a layer if it is kept in few bits."""
    weight = vars(layer).get("weight")
    return weight if isinstance(weight, QuantizedWeight) else None


def read_weights_as(model: nn.Module, dtype: torch.dtype, skip: Container[nn.Module] = ()) -> Callable[[], None]:
    """Let quantized weights of ``model`` be such of ``dtype``, as plain ones are meanwhile. Returns what undoes it.

    Args:
        model: Any module.
        dtype: That plain weights are kept in.
        skip: Modules that are left alone.
    """
    weights = [quantized_weight(module) for module in model.modules() if module not in skip]
    changed = [weight for weight in weights if weight is not None]

    def set_all(dtype: torch.dtype | None) -> None:
        for weight in changed:
            weight.read_as = dtype

    set_all(dtype)
    return partial(set_all, None)


def _call_with(weight: Tensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    args = tuple(weight if isinstance(one, QuantizedWeight) else one for one in args)
    kwargs = {name: weight if isinstance(one, QuantizedWeight) else one for name, one in kwargs.items()}
    return func(*args, **kwargs)


def _computing_dtype(input: Tensor) -> torch.dtype:
    """What a plain weight would be, or be cast to: what the input is."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return input.dtype


def _any_of(kind: type[QuantizedWeight], args: Any, kwargs: Any) -> QuantizedWeight:
    """Find one that is deeper, in a list: ``torch.cat([weight, ...])``."""
    leaves = (leaf for one in (*args, *kwargs.values()) if isinstance(one, list | tuple) for leaf in one)
    return next(leaf for leaf in leaves if isinstance(leaf, kind))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: QuantizedWeight, *_: object) -> NoReturn:
        self.refuse(name)

    return refuse


for _name in ("matmul", "mul", "rmul", "add", "radd", "sub", "rsub", "truediv", "neg", "pow"):
    setattr(QuantizedWeight, f"__{_name}__", _refusing(f"__{_name}__"))
