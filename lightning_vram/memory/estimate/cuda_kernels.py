"""Kernels as CUDA runs them: attention, norms, recurrent networks, and the scratch memory of reductions.

Attention takes the first kernel that can run, by the rules of ``sdp_utils.cpp`` without nested tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend
from typing_extensions import override

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.fake_device import FAKE_GPU_TYPE
from lightning_vram.memory.estimate.known_values import is_mask
from lightning_vram.private_names import dispatcher
from lightning_vram.private_names.torch import tensors_in

Capability = tuple[int, int]
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
# torch 2.14 taught the efficient kernel grouped queries, and fused kernels to broadcast one head of keys.
_GROUPS_IN_ALL = _TORCH >= (2, 14)
_HALVES = (torch.float16, torch.bfloat16)
_WITH_BFLOAT16 = (8, 0)  # older cards convert


@dataclass(frozen=True)
class Attention:
    """One call of ``scaled_dot_product_attention``."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward may come."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose_backend(call: Attention, capability: Capability) -> SDPBackend:
    """Return the kernel that CUDA chooses on a GPU of this compute capability."""
    order = dispatcher.preferred_backends()
    if order[:2] == [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION] and capability[0] in (9, 10):
        order = [SDPBackend.CUDNN_ATTENTION, *order]
    for backend in order:
        if backend in _KERNELS:
            is_enabled, can = _KERNELS[backend]
            if is_enabled() and can(call, capability):
                return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _is_fusable(call: Attention) -> bool:
    tensors = (call.query, call.key, call.value)
    return (
        all(t.dim() == 4 and t.shape[0] == call.query.shape[0] and t.dtype is call.query.dtype for t in tensors)
        and all(t.stride(-1) == 1 or t.shape[-1] == 1 for t in tensors)
        and call.query.shape[-2] > 0
        and call.key.shape[-2] > 0
    )


def _can_cudnn(call: Attention, capability: Capability) -> bool:
    q, k, v = call.query, call.key, call.value
    widest = 256 if _TORCH >= (2, 15) and capability[0] in (9, 10) else 128
    is_wide = q.shape[-1] > 128 or v.shape[-1] > 128
    return (
        _is_fusable(call)
        and _takes_halves(call, capability)
        and _has_groups(call, is_grouping=True)
        and max(q.shape[-1], v.shape[-1]) <= widest
        and not (is_wide and call.needs_gradients and (q.shape[-1], v.shape[-1]) not in ((192, 128), (256, 256)))
        and q.shape[-1] % 8 == v.shape[-1] % 8 == 0
        and k.shape[-2] != 1
        and (call.dropout_p * 16).is_integer()
        and not (call.dropout_p and q.shape[-2] == 1)
        and not (call.attn_mask is not None and call.attn_mask.requires_grad)
        and (not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled())
    )


def _can_flash(call: Attention, capability: Capability) -> bool:
    q, k, v = call.query, call.key, call.value
    is_small_card = capability in ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
    is_wide = 192 < q.shape[-1] <= 224 or (q.shape[-1] > 224 and call.dropout_p > 0)
    return (
        _is_fusable(call)
        and _takes_halves(call, capability)
        and _has_groups(call, is_grouping=True)
        and capability >= (8, 0)
        and call.attn_mask is None
        and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256
        and not (is_small_card and is_wide and call.needs_gradients)
        and not (call.is_causal and q.shape[-2] != k.shape[-2])
    )


def _can_efficient(call: Attention, capability: Capability) -> bool:
    q, k, v = call.query, call.key, call.value
    aligned = 8 if q.dtype in _HALVES and capability >= (7, 0) else 4 if capability >= (8, 0) else 1
    return (
        _is_fusable(call)
        and q.dtype in (*_HALVES, torch.float32)
        and (q.dtype is not torch.bfloat16 or capability >= _WITH_BFLOAT16)
        and _has_groups(call, is_grouping=_GROUPS_IN_ALL)
        and q.shape[-1] == k.shape[-1]
        and q.shape[-1] % aligned == v.shape[-1] % aligned == 0
    )


def _takes_halves(call: Attention, capability: Capability) -> bool:
    return call.query.dtype in (_HALVES if capability >= _WITH_BFLOAT16 else (torch.float16,))


def _has_groups(call: Attention, *, is_grouping: bool) -> bool:
    """Whether the numbers of heads go together."""
    q, k, v = (t.shape[-3] for t in (call.query, call.key, call.value))
    return (
        q == k == v or (_GROUPS_IN_ALL and k == v == 1) or (is_grouping and call.enable_gqa and k == v and q % k == 0)
    )


_KERNELS: dict[SDPBackend, tuple[Callable[[], Any], Callable[[Attention, Capability], bool]]] = {
    SDPBackend.CUDNN_ATTENTION: (torch.backends.cuda.cudnn_sdp_enabled, _can_cudnn),
    SDPBackend.FLASH_ATTENTION: (torch.backends.cuda.flash_sdp_enabled, _can_flash),
    SDPBackend.EFFICIENT_ATTENTION: (torch.backends.cuda.mem_efficient_sdp_enabled, _can_efficient),
    SDPBackend.MATH: (torch.backends.cuda.math_sdp_enabled, lambda *_: True),
}


def _attend(call: Attention, backend: SDPBackend) -> Any:
    tensors = (call.query, call.key, call.value)
    if backend == SDPBackend.FLASH_ATTENTION:
        width = call.query.shape[-1]
        scale = call.scale if call.scale is not None else width**-0.5
        padded = [F.pad(t, (0, -width % 8)) if width % 8 else t for t in tensors]
        result: Tensor = dispatcher.flash_attention(*padded, call.dropout_p, call.is_causal, scale=scale)[0]
        return result[..., :width] if width % 8 else result
    mask = _added_mask(call, is_aligned=backend == SDPBackend.EFFICIENT_ATTENTION)
    if backend == SDPBackend.MATH:
        return dispatcher.math_attention(
            *tensors, mask, call.dropout_p, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
        )[0]
    kernel = dispatcher.cudnn_attention if backend == SDPBackend.CUDNN_ATTENTION else dispatcher.efficient_attention
    return kernel(*tensors, mask, call.needs_gradients, call.dropout_p, call.is_causal, scale=call.scale)[0]


def _added_mask(call: Attention, *, is_aligned: bool) -> Tensor | None:
    mask = call.attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=call.query.dtype, device=mask.device))
    if mask is None or not is_aligned:
        return mask
    if mask.shape[-1] % 8:  # padded to where rows begin, and cut again
        mask = F.pad(mask, (0, -mask.shape[-1] % 8))[..., : mask.shape[-1]]
    return mask.expand((*call.query.shape[:-1], call.key.shape[-2]))


_Way = Callable[[Any, dict[str, Any]], Any]
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_RECURRENT_NOTE = "nn.LSTM, nn.GRU, nn.RNN: memory that cuDNN saves for backward is a rough estimate."
_VECTORS_PER_STEP = {"lstm": 5, "gru": 6, "rnn_tanh": 1, "rnn_relu": 1}
_RECURRENT = tuple(f"aten::{name}.{form}" for name in _VECTORS_PER_STEP for form in ("input", "data"))
# Made of others, some of which autocast casts. Without autograd a dispatch mode would see them whole, where it is late.
_TAKEN_APART = ("aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::instance_norm")
# One kernel, which other devices make of several operators.
_ONE_KERNEL = ("aten::silu_backward", "aten::mish_backward")
# In place, and without a fake kernel. Those of Adam have one.
_FUSED_STEPS = ("aten::_fused_sgd_", "aten::_fused_sgd_.tensor_lr", "aten::_fused_adagrad_")


def kernels_of(capability: Capability, notes: dict[str, None]) -> dict[str, dispatcher.Kernel]:
    """Return the kernel of each operator by its name; ``notes`` gets, as keys, what a reader of numbers should know."""

    def attend(op: Any, given: dict[str, Any]) -> Any:
        call = Attention(**given)
        return _attend(call, choose_backend(call, capability))

    ways: dict[str, _Way] = {
        "aten::scaled_dot_product_attention": attend,
        "aten::rms_norm": _normalise,
        **dict.fromkeys(_RECURRENT, partial(_run_recurrent, notes)),
        **dict.fromkeys(_FUSED_STEPS, lambda op, given: None),
        **dict.fromkeys(_TAKEN_APART, lambda op, given: dispatcher.run_composite_kernel(op, **given)),
        **dict.fromkeys(_ONE_KERNEL, lambda _, given: torch.empty_like(given["grad_output"])),
    }
    return {name: partial(_run, way, dispatcher.operator_named(name)) for name, way in ways.items()}


def _run(way: _Way, op: Any, /, *args: Any, **kwargs: Any) -> Any:
    first = next(tensors_in(args), None)
    if first is not None and first.device.type == FAKE_GPU_TYPE:
        return way(op, dispatcher.given_arguments(op, args, kwargs))
    with dispatcher.exclude_key(dispatcher.BEHIND_AUTOCAST):
        return op(*args, **kwargs)


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory with its channels last, and in no other way."""
    layout = CHANNELS_LAST.get(tensor.dim())
    return layout is not None and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()


def _normalise(op: Any, given: dict[str, Any]) -> Tensor:
    x, weight = given["input"], given.get("weight")
    if is_channels_last(x) or (weight is not None and weight.dtype is not x.dtype):
        return dispatcher.run_composite_kernel(op, **given)  # type: ignore[no-any-return]
    return _RMSNorm.apply(x, len(given["normalized_shape"]), weight)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        scales = x.new_empty((*x.shape[: x.dim() - dims], *(1,) * dims), dtype=dtype)
        ctx.save_for_backward(x, weight, scales)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        needs_x, _, needs_weight = ctx.needs_input_grad
        return (
            torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None,
            None,
            torch.empty_like(weight) if needs_weight else None,
        )


def _run_recurrent(notes: dict[str, None], op: Any, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """``hx`` is the state, or the state and the cell; ``data`` are packed sequences, in one dimension of steps."""
    notes[_RECURRENT_NOTE] = None
    x: Tensor = given["input"] if "input" in given else given["data"]
    states = tuple(given["hx"]) if isinstance(given["hx"], Sequence) else (given["hx"],)
    num_layers, num_hidden = given["num_layers"], states[-1].shape[-1]
    num_directions = states[0].shape[0] // num_layers
    vectors = num_directions * (_VECTORS_PER_STEP[op.overloadpacket.__name__] * num_layers + num_layers - 1)
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    saved_bytes = x.shape[:-1].numel() * vectors * num_hidden * dtype.itemsize if given["train"] else 0
    width = states[0].shape[-1] * num_directions  # of the output: proj_size narrows the state, not the cell
    layers = (dtype, saved_bytes, width, given.get("batch_first", False), len(states))
    return _Recurrent.apply(layers, x, *states, *given["params"])  # type: ignore[no-any-return, no-untyped-call]


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layers: tuple[Any, ...], x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        dtype, saved_bytes, width, is_transposed, num_states = layers
        states, weights = [state.to(dtype) for state in rest[:num_states]], rest[num_states:]
        x = x.to(dtype)
        # what is not cast lies in one
        flat = x.new_empty(sum(weight.numel() for weight in weights)) if weights[0].dtype is not dtype else None
        _time_first(x, is_transposed=is_transposed)
        out = x.new_empty((*x.shape[:-1], width))
        ends = tuple(torch.empty_like(state) for state in states)
        reserve = x.new_empty(saved_bytes, dtype=torch.uint8)
        ctx.is_transposed, ctx.weights = is_transposed, [(weight.shape, weight.dtype) for weight in weights]
        ctx.save_for_backward(x, *states, out, reserve, flat)
        return out, *ends

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *states, _, _, _ = ctx.saved_tensors
        copies = [_time_first(tensor, is_transposed=ctx.is_transposed) for tensor in (x, gradients[0])]
        dx, *dstates = (torch.empty_like(tensor) for tensor in (x, *states))
        copies.clear()
        sizes = [shape.numel() for shape, _ in ctx.weights]
        parts = x.new_zeros(sum(sizes)).split(sizes)
        dweights = (part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, ctx.weights, strict=True))
        return None, dx, *dstates, *dweights


def _time_first(tensor: Tensor, *, is_transposed: bool) -> Tensor:
    """Return a tensor as the kernel takes it."""
    return tensor.transpose(0, 1).contiguous() if is_transposed else tensor.contiguous()


OnScratch = Callable[[str, torch.device, tuple[int, ...]], None]  # gets an operator's name, and each block's bytes
_Blocks = tuple[tuple[int, ...], ...]  # one group after the other

_USUAL_NUMBER = 80
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_MOST_THREADS = 2048
_FLOAT_BYTES = 4
_WELFORD_BYTES = 16  # mean, sum of squares and two counts
_INDEX_BYTES = 8
_SORTED = 6  # places as one number, in order, where they were, counted up, and as much as both for the sort
_ROWS = 128  # that flash attention rounds sequences to
_TILE = 64  # rows and columns that efficient attention sums at once
_TILE_BYTES = _TILE * _TILE * _FLOAT_BYTES + 16  # with a lock
_MAX_BLOCK_THREADS = 512
_WARP = 32
_MAX_VECTOR = 4
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_VECTORIZED_FROM = 128


class Processors(NamedTuple):
    """How many multiprocessors run the blocks, and the threads that each can have at once."""

    number: int
    num_threads: int


class Scratch(dispatcher.UnwrappedMode):
    """Reports what kernels take in addition to their results, after each has its results."""

    def __init__(self, card: DeviceSpec, device: torch.device, on_scratch: OnScratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        num_threads = _THREADS.get(card.capability or (0, 0), _MOST_THREADS)
        self._processors = Processors(card.num_multiprocessors or _USUAL_NUMBER, num_threads)
        self._device = device
        self._on_scratch = on_scratch

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is dispatcher.ASK_DEVICE:
            return args[0].device
        result = func(*args, **(kwargs or {}))
        blocks_of = _BLOCKS.get(func) if isinstance(func, dispatcher.OpOverload) else None
        if blocks_of is not None and args[0].device.type == self._device.type:
            given = {**dispatcher.given_arguments(func, args, kwargs or {}), "result": result}
            for sizes in blocks_of(given, self._processors):
                self._on_scratch(str(func), self._device, sizes)
        return result


def _reduce(accumulator_bytes: int, given: Mapping[str, Any], processors: Processors) -> _Blocks:
    x: Tensor = given["self"]
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    width = x.element_size() // _FLOAT_BYTES or 1  # sums of 16 bits are of 32
    return (reduction_buffers(x, dims, accumulator_bytes * width, processors),) if x.dim() else ()


def _flash_backward(given: Mapping[str, Any], processors: Processors) -> _Blocks:
    query, key = given["query"], given["key"]
    batch_size, num_heads, length, width = query.shape
    rows = batch_size * num_heads * _up(length, _ROWS) * _ROWS
    sums = (rows * _FLOAT_BYTES, rows * _up(width, 32) * 32 * _FLOAT_BYTES)
    if key.shape[1] == num_heads:
        return (sums,)
    return ((*sums, *2 * (key.numel() // key.shape[1] * num_heads * key.element_size(),)),)


def _efficient_backward(given: Mapping[str, Any], processors: Processors) -> _Blocks:
    query: Tensor = given["query"]
    batch_size, num_heads, length, width = query.shape
    tiles = batch_size * num_heads * _up(length, _TILE) * _up(width, _TILE)
    sums = batch_size * num_heads * length * _FLOAT_BYTES, tiles * _TILE_BYTES
    if query.element_size() < _FLOAT_BYTES:  # the kernel multiplies gradients with outputs itself
        return (sums,)
    return (given["grad_out_"].numel() * _FLOAT_BYTES,), sums


def _sorted_index_put(given: Mapping[str, Any], _: Processors) -> _Blocks:
    """Places, and what they are sorted with (``index_put_with_sort_kernel`` of ATen/native/cuda/Indexing.cu)."""
    if not given.get("accumulate"):
        return ()
    indices, values = given["indices"], given["values"]
    num_dims = sum(one.dim() if one is not None and is_mask(one) else 1 for one in indices)  # a mask: all of its own
    num_places = values.numel() // max(1, prod(given["self"].shape[num_dims:]))
    return ((_place_bytes(indices, values, given["self"].dim()), *_SORTED * (num_places * _INDEX_BYTES,)),)


def _place_bytes(indices: Sequence[Tensor | None], selected: Tensor, num_dims: int) -> int:
    num_masked = sum(one.dim() for one in indices if one is not None and is_mask(one))
    first = next(place for place, one in enumerate(indices) if one is not None)
    return num_masked * (selected.shape[first] if first < min(selected.dim(), num_dims) else 1) * _INDEX_BYTES


_aten = torch.ops.aten
_SUMS = (
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
    *(_aten.linalg_vector_norm.default, _aten.prod.default, _aten.prod.dim_int),
)
_VARIANCES = (_aten.var.correction, _aten.var_mean.correction, _aten.std.correction)
_BLOCKS: dict[Any, Callable[[Mapping[str, Any], Processors], _Blocks]] = {
    **dict.fromkeys(_SUMS, partial(_reduce, _FLOAT_BYTES)),
    **dict.fromkeys(_VARIANCES, partial(_reduce, _WELFORD_BYTES)),
    # places that masks select, as ``nonzero`` finds them
    _aten.index.Tensor: lambda given, _: ((_place_bytes(given["indices"], given["result"], given["self"].dim()),),),
    **dict.fromkeys((_aten.index_put.default, _aten.index_put_.default, dispatcher.INDEX_PUT), _sorted_index_put),
    dispatcher.flash_backward: _flash_backward,
    dispatcher.efficient_backward: _efficient_backward,
}

_Axes = list[tuple[int, int]]  # stride and size, fastest first, without sizes of 1, joined where they can be


def reduction_buffers(x: Tensor, dims: list[int], accumulator_bytes: int, processors: Processors) -> tuple[int, ...]:
    """Return the bytes of partial results and of their semaphores; nothing if each output is made by one block."""
    if not x.numel():
        return ()
    reduced_dims = {dim % x.dim() for dim in dims} or set(range(x.dim()))
    reduced = _axes(x, reduced_dims)
    kept = _axes(x, set(range(x.dim())) - reduced_dims)
    num_reduced, num_kept = (prod(size for _, size in axes) for axes in (reduced, kept))
    is_fastest = not kept or (bool(reduced) and reduced[0][0] < kept[0][0])
    vector = 1 if is_fastest else _output_vector(x, reduced, kept)
    first, second = (num_reduced, num_kept) if is_fastest else (num_kept // vector, num_reduced)
    if is_fastest and first >= _VECTORIZED_FROM and len(reduced) == 1 and reduced[0][0] == 1:
        first //= _MAX_VECTOR
    width, height = _block(first, second, _MAX_BLOCK_THREADS // vector)
    step_input, step_output = (width, 1) if is_fastest else (1, width)
    if _up(num_reduced, step_input) < min(height * _MIN_VALUES, _MAX_VALUES):
        return ()  # each warp makes outputs of its own
    values = _up(num_reduced, step_input * height)
    grid = _up(num_kept // vector, step_output)
    target = processors.number * (processors.num_threads // (width * height))
    if values < _MAX_VALUES or grid > target:
        return ()
    blocks = max(min(_up(target, grid), _up(values, _MIN_VALUES)), _up(values, _MAX_VALUES))
    if blocks == 1:
        return ()
    return accumulator_bytes * num_kept * blocks * (1 if is_fastest else width * vector), 4 * grid


def _axes(x: Tensor, dims: set[int]) -> _Axes:
    axes: _Axes = []
    for stride, size in sorted((x.stride(dim), x.shape[dim]) for dim in dims if x.shape[dim] != 1):
        if axes and prod(axes[-1]) == stride:
            axes[-1] = axes[-1][0], axes[-1][1] * size
        else:
            axes.append((stride, size))
    return axes


def _output_vector(x: Tensor, reduced: _Axes, kept: _Axes) -> int:
    (stride, size), *others = kept
    vector = _MAX_VECTOR if stride == 1 else 1
    for number in (x.storage_offset(), size, *(one for one, _ in chain(reduced, others))):
        while number % vector:
            vector //= 2
    return vector


def _block(first: int, second: int, most: int) -> tuple[int, int]:
    first, second = (min(1 << (max(1, number).bit_length() - 1), most) for number in (first, second))
    height = min(second, most // min(first, _WARP))
    return min(first, most // height), height


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)
