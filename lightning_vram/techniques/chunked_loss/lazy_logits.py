"""Logits that are computed only once it is known what for.

Shape, dtype and device are those of the tensor that the head would return. Functions that treat each token alone
(``log_softmax``, a temperature, cutting the last position) are recorded; functions that leave a few values per token
(a loss, ``gather``, ``logsumexp``) are computed for some tokens at a time. Any other function gets the whole tensor,
which is then stored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.hooks import is_in_backward
from lightning_vram.core.tensors.properties import REAL_TYPES, version_of
from lightning_vram.memory.device.accelerators import FreeMemory, free_memory_of
from lightning_vram.private_names.dispatcher import hide_from_dynamo
from lightning_vram.private_names.fsdp2 import waits_for_backward
from lightning_vram.private_names.torch import VIEW_PROPERTIES, make_wrapper, tree_map_only, without_torch_function
from lightning_vram.techniques.chunked_loss.row_program import (
    Call,
    Head,
    Node,
    RowProgram,
    compute_rows,
    compute_sum,
    detach,
    read_autocast,
    walk,
)

_FEWEST_ROWS = {"cpu": 128}  # fewer leave products of matrices slow; elsewhere 256
_FEWEST_WHERE_FULL = 16
_MATRICES = 5  # of a chunk, in float32: logits, their logarithms, the gradients of both, one more for soft caps
_MARGIN = 10  # the part of the room that is left free: cached blocks may not fit


def find_chunk_rows(chunk: int | Literal["auto"], hidden: Tensor, num_rows: int, num_classes: int) -> int:
    """Return how many tokens are computed at a time, from sizes only, so that a run can be repeated."""
    if chunk != "auto":
        return chunk
    fewest = _FEWEST_ROWS.get(hidden.device.type, 256)
    return max(fewest, 1 << max(0, (num_rows * hidden.shape[-1] // num_classes - 1).bit_length()))


class ChunkRows:
    """:func:`find_chunk_rows`, and fewer from then on where the device has no room for as many.

    Room is asked for in each forward, which waits for nothing: moments of the optimizer come after the first. What a
    checkpoint runs again has the chunks of its first run. Tensors without values, as in estimates, have no room.
    """

    def __init__(self, chunk: int | Literal["auto"]) -> None:
        self._chunk = chunk
        self._rooms: dict[torch.device, FreeMemory | None] = {}
        self._fewer: dict[tuple[torch.device, int, int, int], int] = {}

    def __call__(self, hidden: Tensor, num_rows: int, num_classes: int, *, asks: bool) -> int:
        """Return the rows; ``asks`` whether they are computed now, so that free memory counts."""
        rows = find_chunk_rows(self._chunk, hidden, num_rows, num_classes)
        device, width = hidden.device, hidden.shape[-1]
        if self._chunk != "auto" or type(hidden) not in REAL_TYPES:
            return rows
        key = (device, num_rows, width, num_classes)
        rows = self._fewer.get(key, rows)
        if not asks or is_in_backward():
            return rows
        if device not in self._rooms:
            self._rooms[device] = free_memory_of(device)
        room = self._rooms[device]
        if room is None:
            return rows
        num_bytes = max(4, hidden.element_size())
        # The gradient of the weights in float32, and a cast of them or of it; that of the hidden states.
        lasting_bytes = num_bytes * (2 * num_classes + num_rows) * width
        allowed_bytes = room.room_bytes() * (_MARGIN - 1) // _MARGIN - lasting_bytes
        fitting = max(_FEWEST_WHERE_FULL, allowed_bytes // (_MATRICES * num_bytes * num_classes))
        if fitting < rows:
            rows = self._fewer[key] = 1 << (fitting.bit_length() - 1)
        return rows


PROPERTIES = VIEW_PROPERTIES | {
    *("shape", "dtype", "device", "ndim", "layout", "names", "is_leaf", "requires_grad", "grad_fn"),
    *("retains_grad", "output_nr", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta"),
    *("is_mtia", "is_ipu", "is_maia", "is_vulkan", "is_mkldnn", "is_sparse", "is_sparse_csr", "is_nested"),
    "is_quantized",
}
QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "is_same_size", "storage_offset", "get_device", "is_conj"),
    *("is_neg", "is_inference", "__len__"),
}
IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__set__"})


class Settings:
    """What logits of one head share; ``tell`` gets the name of each function that got whole logits."""

    def __init__(self, name: str, find_chunk_rows: ChunkRows, tell: Callable[[str], None]) -> None:
        self.name, self.find_chunk_rows, self.tell = name, find_chunk_rows, tell


class Memory:
    """What logits that would share memory have in common."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.written: LazyLogits | None = None


class LazyLogits(Tensor):
    """See the module. Made by :func:`make_logits`."""

    node: Node
    sample: Tensor  # the same of no token, [0, V]
    class_dim: int  # which dimension has the V classes: the last, or 1 where others come after it
    memory: Memory
    whole: Tensor | None  # the tensor itself, once somebody needed it
    versions: list[tuple[Tensor, int]]  # how often what it is made of had been written to
    has_graph: bool  # whether its node leads to what has gradients

    @property
    def is_adopted(self) -> bool:
        """Whether a function of autograd made it without gradients, and has returned it: its graph is not ours."""
        return self.requires_grad and not self.has_graph

    @property
    def lead(self) -> torch.Size:
        """Shape of what has a row each."""
        shape = list(self.shape)
        del shape[self.class_dim]
        return torch.Size(shape)

    def like(
        self, node: Node, sample: Tensor, lead: Sequence[int], *, class_dim: int | None = None, is_view: bool
    ) -> "LazyLogits":
        """Return others of the same head."""
        memory = self.memory if is_view else Memory(self.memory.settings)
        return _make(node, sample, lead, len(lead) if class_dim is None else class_dim, memory)

    def reduce(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Return what a function returns for all tokens, [N, ...] each. Nodes are given to it as values of some."""
        root = Call(function, (self.node, *args), kwargs, _autocast_of(self))
        return compute_rows(root, self.chunk_rows)

    def reduce_to_sum(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tensor:
        """Return the sum over all tokens of what a function returns, [N]."""
        return compute_sum(Call(function, (self.node, *args), kwargs, _autocast_of(self)), self.chunk_rows)

    @property
    def chunk_rows(self) -> int:
        """How many tokens are computed at a time."""
        return _chunk_rows(self.memory.settings, self.node, self.lead, asks=True)

    def make_whole(self, why: str) -> Tensor:
        """Return the tensor; it is made once, for the function named ``why``."""
        if self.whole is None:
            with torch.set_grad_enabled(self.requires_grad):
                self.whole = _Adopted.apply(self, why) if self.is_adopted else self.compute(why)  # type: ignore[no-untyped-call]
            if self.whole.requires_grad:
                for hook in self._hooks():
                    self.whole.register_hook(hook)
        return self.whole

    def compute(self, why: str) -> Tensor:
        """Return the tensor, which is not kept; see :meth:`make_whole`."""
        self.check()
        self.memory.settings.tell(why)
        rows = RowProgram(_as_call(self.node), 1).compute_whole()
        whole = rows.view(*self.lead, rows.shape[-1])
        return whole.movedim(-1, self.class_dim) if self.class_dim != self.ndim - 1 else whole

    def add_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Have a hook called when a backward comes here; it gets no gradient."""
        heads = [one for one in walk(self.node) if isinstance(one, Head)]
        handle = RemovableHandle(heads[0].hooks)
        for head in heads:
            head.hooks[handle.id] = hook
        return handle

    def _hooks(self) -> list[Callable[[Tensor], Any]]:
        return [hook for head in walk(self.node) if isinstance(head, Head) for hook in head.hooks.values()]

    def settle(self, why: str) -> None:
        """Have the values, without a graph, for those who read them when the weights are others."""
        if self.whole is None:
            with torch.no_grad():
                self.node = detach(self.node)
                self.whole = self.make_whole(why).detach()

    def check(self) -> None:
        """Raise ``RuntimeError`` if what they are made of was written to since, or a view of the logits."""
        name, written = self.memory.settings.name, self.memory.written
        if written is not None and written is not self:
            raise RuntimeError(
                f"ChunkedLoss: logits of {name} were written to in place, and then read through another view of "
                "them. Write logits = logits.masked_fill(...) or the like, or leave ChunkedLoss out."
            )
        for tensor, version in self.versions:
            if version_of(tensor) != version or (tensor.numel() and not tensor.untyped_storage().nbytes()):
                raise RuntimeError(
                    f"ChunkedLoss: logits of {name} are read after their input, weights or masks have changed or "
                    "were freed. Compute the loss before the optimizer step, and store results instead of logits: "
                    "logits.argmax(-1), logits.cpu()."
                )

    @classmethod
    @hide_from_dynamo
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note, compute by chunks, or make whole."""
        from lightning_vram.techniques.chunked_loss.functions import FUNCTIONS  # which make logits

        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        is_getter = name == "__get__"
        if is_getter:
            name = func.__self__.__name__
        if name in (PROPERTIES if is_getter else QUESTIONS) or func is Tensor.__repr__:
            with without_torch_function():
                return func(*args, **options) if func is not Tensor.__repr__ else f"LazyLogits({tuple(args[0].shape)})"
        args, options = tree_map_only(LazyLogits, _if_made, (args, options))
        ours = [one for one in (*args, *options.values()) if isinstance(one, LazyLogits)]
        if name == "register_hook" and ours and waits_for_backward(args[1]):
            return ours[0].add_hook(args[1])
        is_writing = name in IN_PLACE or (name.endswith("_") and not name.startswith("__")) or "out" in options
        if ours and (not is_getter or name == "mT") and not is_writing and name in FUNCTIONS:
            for one in ours:
                one.check()
            result = FUNCTIONS[name](func, args, options)
            if result is not NotImplemented:
                return result
        if is_writing and args and isinstance(args[0], LazyLogits):
            args[0].memory.written = args[0]
        whole_args, whole_options = tree_map_only(LazyLogits, lambda one: one.make_whole(name), (args, options))
        return func(*whole_args, **whole_options)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Make whole for what passes by Python's functions, such as somebody's ``autograd.Function``."""

        def values(one: LazyLogits) -> Tensor:
            # Below autograd: what is made here has no graph, and must not be kept for who wants one.
            return one.compute(str(func)) if one.whole is None else one.whole.detach()

        whole_args, whole_options = tree_map_only(LazyLogits, values, (args, dict(kwargs or {})))
        return func(*whole_args, **whole_options)


def make_logits(head: Head, settings: Settings) -> LazyLogits:
    """Return the logits of a head, [..., V]."""
    if not torch.is_grad_enabled():
        bias = None if head.bias is None else head.bias.detach()
        head = Head(head.hidden.detach(), head.weight.detach(), bias, head.dtype)
    with torch.no_grad():
        sample = head.compute(head.hidden.new_empty(0, head.hidden.shape[-1]))
    return _make(head, sample, head.hidden.shape[:-1], head.hidden.ndim - 1, Memory(settings))


class _Unmade(torch.autograd.Function):
    """Logits that are not computed, with a graph behind them for code that bypasses Python's functions."""

    @staticmethod
    def forward(
        ctx: Any, program: RowProgram, shape: Sequence[int], dtype: torch.dtype, class_dim: int, *inputs: Any
    ) -> Any:
        """Return a tensor without values."""
        ctx.program, ctx.class_dim = program, class_dim
        ctx.save_for_backward(*inputs)
        device = next(one.device for one in inputs if one is not None)
        return make_wrapper(LazyLogits, shape, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return what a gradient of the logits means for what they are made of."""
        ctx.program.announce_backward()
        rows = gradient.movedim(ctx.class_dim, -1)
        found = ctx.program.run_backward(ctx.saved_tensors, [rows.flatten(0, -2)], ctx.needs_input_grad[4:])
        return (None, None, None, None, *found)


class _Adopted(torch.autograd.Function):
    """The values of logits, with the graph that autograd gave to them."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, why: str) -> Tensor:
        """Return them."""
        return logits.compute(why)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Hand their gradient on."""
        return gradient, None


def _make(node: Node, sample: Tensor, lead: Sequence[int], class_dim: int, memory: Memory) -> LazyLogits:
    shape = list(lead)
    shape.insert(class_dim, sample.shape[-1])
    program = RowProgram(_as_call(node), _chunk_rows(memory.settings, node, lead, asks=False))
    made: LazyLogits = _Unmade.apply(program, shape, sample.dtype, class_dim, *program.inputs())  # type: ignore[no-untyped-call]
    made.node, made.sample, made.class_dim, made.memory, made.whole = node, sample, class_dim, memory, None
    made.has_graph = made.requires_grad
    made.versions = [(one, version_of(one)) for one in program.inputs() if one is not None]
    return made


def _chunk_rows(settings: Settings, node: Node, lead: Sequence[int], *, asks: bool) -> int:
    head = next(one for one in walk(node) if isinstance(one, Head))
    return settings.find_chunk_rows(head.hidden, math.prod(lead), head.weight.shape[0], asks=asks)


def _as_call(node: Node) -> Call:
    return node if isinstance(node, Call) else Call(lambda value: value, (node,))


def _if_made(one: LazyLogits) -> Tensor:
    if one.is_adopted:
        return one.make_whole("checkpoint(use_reentrant=True)")
    return one if one.whole is None else one.whole


def _autocast_of(one: LazyLogits) -> tuple[bool, torch.dtype] | None:
    return read_autocast(one.device.type)
