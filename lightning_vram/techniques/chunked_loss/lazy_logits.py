"""Logits that are computed only once it is known what for.

Shape, dtype and device are those of the tensor that the head would return. Functions that treat each token alone
(``log_softmax``, a temperature, cutting the last position) are recorded; functions that leave a few values per token
(a loss, ``gather``, ``logsumexp``) are computed for some tokens at a time. Any other function gets the whole tensor,
which is then stored.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_vram.core.hooks import hide_from_dynamo
from lightning_vram.core.tensors.properties import version_of
from lightning_vram.private_names.fsdp2 import waits_for_backward
from lightning_vram.private_names.torch import VIEW_PROPERTIES, make_wrapper, tree_map_only, without_torch_function
from lightning_vram.techniques.chunked_loss.row_program import (
    Call,
    RowProgram,
    compute_later,
    compute_rows,
    compute_sum,
    detach,
    heads_of,
    inputs_of,
    read_autocast,
)

_FEWEST_ROWS = {"cpu": 128}  # fewer leave products of matrices slow; elsewhere 256


def find_chunk_rows(chunk: int | Literal["auto"], hidden: Tensor, num_rows: int, num_classes: int) -> int:
    """Return how many tokens are computed at a time, from sizes only, so that a run can be repeated."""
    if chunk != "auto":
        return chunk
    fewest = _FEWEST_ROWS.get(hidden.device.type, 256)
    return max(fewest, 1 << max(0, (num_rows * hidden.shape[-1] // num_classes - 1).bit_length()))


PROPERTIES = VIEW_PROPERTIES | {
    *("shape", "dtype", "device", "ndim", "layout", "is_leaf", "requires_grad", "grad_fn", "retains_grad", "itemsize"),
    *("nbytes", "is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_nested", "is_quantized"),
}
QUESTIONS = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "__len__"),
    *("is_floating_point", "is_complex", "is_signed", "is_same_size", "storage_offset", "get_device", "is_inference"),
}


class NeedsWholeError(Exception):
    """A function cannot be computed by chunks as it was called."""


Function = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""Gets a function of torch and its arguments; returns what that returns, or raises :class:`NeedsWholeError`."""


@dataclass(frozen=True)
class Settings:
    """What logits of one head share; ``tell`` gets the name of each function that got whole logits."""

    name: str
    chunk: int | Literal["auto"]
    functions: Mapping[str, Function]  # those computed by chunks, by the names of torch's functions
    tell: Callable[[str], None]


class LazyLogits(Tensor):
    """See the module. Made by :func:`make_logits`."""

    node: Call
    sample: Tensor  # the same of no token, [0, V]
    class_dim: int  # which dimension has the V classes
    settings: Settings
    memory: list[tuple[Tensor, int]]  # of all views of the same logits: what is whole, and how often it was written to
    whole: Tensor | None  # the tensor itself, once somebody needed it
    versions: list[tuple[Tensor, int]]  # how often what it is made of had been written to
    has_graph: bool  # whether its node leads to what has gradients

    @property
    def lead(self) -> torch.Size:
        """Shape of what has a row each."""
        return torch.Size(size for dim, size in enumerate(self.shape) if dim != self.class_dim)

    def like(
        self, node: Call, sample: Tensor, lead: Sequence[int], class_dim: int | None = None, *, is_view: bool
    ) -> "LazyLogits":
        """Return others of the same head."""
        memory = self.memory if is_view else []
        return _make(node, sample, (lead, len(lead) if class_dim is None else class_dim), self.settings, memory)

    def reduce(self, function: Callable[..., Any], /, *nodes: Any, **kwargs: Any) -> list[Tensor]:
        """Return what a function of the values of nodes returns for all tokens, [N, ...] each."""
        return compute_rows(Call(function, nodes, kwargs, read_autocast(self.device.type)), self.chunk_rows)

    def reduce_to_sum(self, function: Callable[..., Any], /, *nodes: Any, **kwargs: Any) -> Tensor:
        """Return the sum over all tokens of what a function of the values of nodes returns, [N]."""
        return compute_sum(Call(function, nodes, kwargs, read_autocast(self.device.type)), self.chunk_rows)

    @property
    def chunk_rows(self) -> int:
        """How many tokens are computed at a time."""
        hidden, weight = heads_of(self.node)[0].args[:2]
        return find_chunk_rows(self.settings.chunk, hidden.values, math.prod(self.lead), weight.values.shape[0])

    def make_whole(self, why: str, *, with_graph: bool = True) -> Tensor:
        """Return the tensor; it is made once, for the function named ``why``."""
        if self.whole is None:
            with torch.set_grad_enabled(self.requires_grad and with_graph):
                whole: Tensor = _Whole.apply(self, why)  # type: ignore[no-untyped-call]
            self.whole = whole
            self.memory.append((whole, version_of(whole)))
        return self.whole

    def compute(self, why: str) -> Tensor:
        """Return the tensor, without a graph, which is not kept; see :meth:`make_whole`."""
        self.check()
        self.settings.tell(why)
        with torch.no_grad():
            (rows,) = RowProgram(self.node).run(inputs_of(self.node))
        # Not as a view: it may be written to in place.
        return rows.view(*self.lead, rows.shape[-1]).movedim(-1, self.class_dim).data

    def check(self) -> None:
        """Raise ``RuntimeError`` if what they are made of was written to since, or a view of the logits."""
        made_of = self.versions if self.whole is None else []
        for tensor, version in (*made_of, *(pair for pair in self.memory if pair[0] is not self.whole)):
            if version_of(tensor) != version or (tensor.numel() and not tensor.untyped_storage().nbytes()):
                raise RuntimeError(
                    f"ChunkedLoss: logits of {self.settings.name} are read after their input, weights, masks or a view "
                    "of them have changed or were freed. Compute the loss before the optimizer step, store results "
                    "instead of logits (logits.argmax(-1), logits.cpu()), and write logits = logits.masked_fill(...) "
                    "or the like instead of in place."
                )

    @classmethod
    @hide_from_dynamo
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note, compute by chunks, or make whole."""
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        is_getter = name == "__get__"
        if is_getter:
            name = func.__self__.__name__
        if func is Tensor.__repr__:
            return f"LazyLogits({tuple(args[0].shape)})"
        if name in (PROPERTIES if is_getter else QUESTIONS):
            with without_torch_function():
                return func(*args, **options)
        args, options = tree_map_only(LazyLogits, _if_made, (args, options))
        ours = [one for one in (*args, *options.values()) if isinstance(one, LazyLogits)]
        if name == "register_hook" and ours and waits_for_backward(args[1]):
            for head in heads_of(ours[0].node):
                head.hooks.append(args[1])
            return None
        if ours and name in ours[0].settings.functions and not options.keys() & {"out", "inplace"}:
            try:
                return ours[0].settings.functions[name](func, args, options)
            except NeedsWholeError:
                pass
        args, options = tree_map_only(LazyLogits, lambda one: one.make_whole(name), (args, options))
        return func(*args, **options)

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


def _if_made(one: LazyLogits) -> Tensor:
    if one.requires_grad and not one.has_graph:  # made without gradients in a function of autograd that returned it
        return one.make_whole("checkpoint(use_reentrant=True)")
    one.check()
    return one if one.whole is None else one.whole


class _Whole(torch.autograd.Function):
    """The values of logits; their gradient is handed on to the graph of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits, why: str) -> Tensor:
        """Return them."""
        return logits.compute(why)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Hand their gradient on."""
        return gradient, None


def make_logits(head: Call, settings: Settings) -> LazyLogits:
    """Return the logits of a head, [..., V]."""
    hidden, *rest = inputs_of(head)
    with torch.no_grad():
        sample = head.function(hidden.new_empty(0, hidden.shape[-1]), *rest, **head.kwargs)
    return _make(head, sample, (hidden.shape[:-1], hidden.ndim - 1), settings, [])


def _make(
    node: Call, sample: Tensor, layout: tuple[Sequence[int], int], settings: Settings, memory: list[Any]
) -> LazyLogits:
    """Return logits of the layout (shape of the tokens, dimension of the classes)."""
    if not torch.is_grad_enabled():
        node = detach(node)
    shape, class_dim = list(layout[0]), layout[1]
    shape.insert(class_dim, sample.shape[-1])
    make = partial(make_wrapper, LazyLogits, shape, dtype=sample.dtype, device=sample.device)
    made: LazyLogits = compute_later(node, class_dim, make)
    made.node, made.sample, made.class_dim, made.settings, made.memory = node, sample, class_dim, settings, memory
    made.whole, made.has_graph = None, made.requires_grad
    made.versions = [(one, version_of(one)) for one in inputs_of(node)]
    return made
