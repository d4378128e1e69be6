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
from itertools import chain
from types import EllipsisType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_vram.memory.storages import version_of
from lightning_vram.private_names.dispatcher import hide_from_dynamo
from lightning_vram.private_names.fsdp2 import waits_for_backward
from lightning_vram.private_names.torch import VIEW_PROPERTIES, make_wrapper, tree_map_only, without_torch_function
from lightning_vram.techniques.chunked_loss import row_program

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


@dataclass(frozen=True)
class Settings:
    """What logits of one head share; ``tell`` gets the name of each function that got whole logits."""

    name: str
    chunk: int | Literal["auto"]
    tell: Callable[[str], None]


class LazyLogits(Tensor):
    """See the module. Made by :func:`make_logits`."""

    node: row_program.Call
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
        self,
        node: row_program.Call,
        sample: Tensor,
        lead: Sequence[int],
        class_dim: int | None = None,
        *,
        is_view: bool,
    ) -> "LazyLogits":
        """Return others of the same head."""
        memory = self.memory if is_view else []
        return _make(node, sample, (lead, len(lead) if class_dim is None else class_dim), self.settings, memory)

    def reduce(self, function: Callable[..., Any], /, *nodes: Any, **kwargs: Any) -> list[Tensor]:
        """Return what a function of the values of nodes returns for all tokens, [N, ...] each."""
        return row_program.compute_rows(
            row_program.Call(function, nodes, kwargs, row_program.read_autocast(self.device.type)), self.chunk_rows
        )

    def reduce_to_sum(self, function: Callable[..., Any], /, *nodes: Any, **kwargs: Any) -> Any:
        """Return the sum over all tokens of what a function of the values of nodes returns, [N]."""
        return row_program.compute_sum(
            row_program.Call(function, nodes, kwargs, row_program.read_autocast(self.device.type)), self.chunk_rows
        )

    @property
    def chunk_rows(self) -> int:
        """How many tokens are computed at a time."""
        hidden, weight = row_program.heads_of(self.node)[0].args[:2]
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
            (rows,) = row_program.RowProgram(self.node).run(row_program.inputs_of(self.node))
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
            for head in row_program.heads_of(ours[0].node):
                head.hooks.append(args[1])
            return None
        if ours and name in FUNCTIONS and options.get("out") is None and not options.get("inplace"):
            try:
                return FUNCTIONS[name](func, args, options)
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
        return logits.compute(why)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def make_logits(head: row_program.Call, settings: Settings) -> LazyLogits:
    """Return the logits of a head, [..., V]."""
    hidden, *rest = row_program.inputs_of(head)
    with torch.no_grad():
        sample = head.function(hidden.new_empty(0, hidden.shape[-1]), *rest, **head.kwargs)
    return _make(head, sample, (hidden.shape[:-1], hidden.ndim - 1), settings, [])


def _make(
    node: row_program.Call, sample: Tensor, layout: tuple[Sequence[int], int], settings: Settings, memory: list[Any]
) -> LazyLogits:
    """Return logits of the layout (shape of the tokens, dimension of the classes)."""
    if not torch.is_grad_enabled():
        node = row_program.detach(node)
    shape, class_dim = list(layout[0]), layout[1]
    shape.insert(class_dim, sample.shape[-1])
    make = partial(make_wrapper, LazyLogits, shape, dtype=sample.dtype, device=sample.device)
    made: LazyLogits = row_program.compute_later(node, class_dim, make)
    made.node, made.sample, made.class_dim, made.settings, made.memory = node, sample, class_dim, settings, memory
    made.whole, made.has_graph = None, made.requires_grad
    made.versions = [(one, version_of(one)) for one in row_program.inputs_of(node)]
    return made


def _require(condition: object) -> None:
    if not condition:
        raise NeedsWholeError


def _bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name, without those that are ``None``."""
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if value is not None}


def _is_last(logits: object) -> bool:
    """Whether these are logits whose last dimension has the classes."""
    return isinstance(logits, LazyLogits) and logits.class_dim == logits.ndim - 1


def view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Functions that return views: strides of a tensor without values tell which tokens and classes they take."""
    logits = args[0]
    _require(isinstance(logits, LazyLogits) and (_is_last(logits) or func.__name__ in _TURNS))
    _require(func.__name__ != "view_as" or args[1] is not logits)  # asked by autograd, for hooks of modules' gradients
    _require(not any(isinstance(one, torch.dtype) for one in chain(args, kwargs.values())))
    base = torch.empty(*logits.lead, logits.shape[logits.class_dim], device="meta").movedim(-1, logits.class_dim)
    others = [torch.empty(one.shape, device="meta") if isinstance(one, Tensor) else one for one in args[1:]]
    found = func(base, *others, **kwargs)
    return _view(logits, found) if isinstance(found, Tensor) else tuple(_view(logits, one) for one in found)


def _view(logits: LazyLogits, found: Tensor) -> LazyLogits:
    num_classes, lead = logits.sample.shape[-1], logits.lead
    places = [dim for dim, size in enumerate(found.shape) if size > 1 and found.stride(dim) == 1]
    tokens = [dim for dim in range(found.ndim) if dim not in places]
    is_of_tokens = all(found.stride(dim) % num_classes == 0 or found.shape[dim] == 1 for dim in tokens)
    _require(len(places) == 1 and tokens and is_of_tokens and found.numel())
    place, (offset, first) = places[0], divmod(int(found.storage_offset()), num_classes)
    _require(first + found.shape[place] <= num_classes)
    shape, strides = [found.shape[dim] for dim in tokens], [found.stride(dim) // num_classes for dim in tokens]
    order = torch.empty(lead.numel(), device="meta").as_strided(shape, strides, offset)

    def move(rows: Tensor) -> Tensor:
        if order.numel() == lead.numel() and order.is_contiguous():
            return rows.reshape(*shape, rows.shape[-1])
        flat = rows.reshape(-1, rows.shape[-1])
        step, step_within = flat.stride()
        sizes, steps = [*shape, flat.shape[-1]], [*(stride * step for stride in strides), step_within]
        return flat.as_strided(sizes, steps, flat.storage_offset() + offset * step)

    node, sample = row_program.map_rows(logits.node, move), logits.sample
    if found.shape[place] < num_classes:
        some = slice(first, first + found.shape[place])
        node, sample = row_program.Call(lambda rows: rows[:, some], (node,)), sample[:, some]
    return logits.like(node, sample, shape, place, is_view=True)


def take_items(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``logits[...]``: some tokens, some neighbouring classes, or a class of each token."""
    logits, index = args
    parts = list(index) if isinstance(index, tuple) else [index]
    _require(all(isinstance(one, int | slice | EllipsisType | Tensor | None) for one in parts) and _is_last(logits))
    _require(not any(isinstance(one, bool) for one in parts))
    if not any(isinstance(one, Tensor) for one in parts):
        return view(func, args, kwargs)
    *tokens, classes = _complete(parts, logits.ndim)
    numbers = torch.arange(logits.lead.numel(), device=logits.device).view(logits.lead)
    if isinstance(classes, slice):
        return _take(logits, numbers[tuple(tokens)])[..., classes]
    _require(all(isinstance(one, Tensor) and one.dtype == torch.int64 for one in (*tokens, classes)))
    chosen, classes = torch.broadcast_tensors(numbers[tuple(tokens)], classes)  # type: ignore[no-untyped-call]
    return _take(logits, chosen).gather(-1, classes.unsqueeze(-1)).squeeze(-1)


def _complete(parts: Sequence[Any], ndim: int) -> list[Any]:
    """Return an index with an entry for each dimension."""
    _require(not any(one is None for one in parts))
    masks = (torch.bool, torch.uint8)
    used = sum(
        one.ndim if isinstance(one, Tensor) and one.dtype in masks else 1 for one in parts if one is not Ellipsis
    )
    place = next((place for place, one in enumerate(parts) if one is Ellipsis), len(parts))
    return [*parts[:place], *[slice(None)] * (ndim - used), *parts[place + 1 :]]


def _take(logits: LazyLogits, numbers: Tensor) -> LazyLogits:
    """Return the logits of tokens with these numbers, in their shape."""
    _require(numbers.dim())

    def take(rows: Tensor) -> Tensor:
        return rows.reshape(-1, rows.shape[-1]).index_select(0, numbers.flatten()).view(*numbers.shape, rows.shape[-1])

    return logits.like(row_program.map_rows(logits.node, take), logits.sample, numbers.shape, is_view=False)


def cut_off(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``detach``."""
    (logits,) = args
    with torch.no_grad():
        return logits.like(logits.node, logits.sample, logits.lead, logits.class_dim, is_view=True)


def each(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Note a function of single logits, with scalars, values for each token, or other logits."""
    first = next(one for one in chain(args, kwargs.values()) if isinstance(one, LazyLogits))
    pairs = [_beside(value, first) for value in args]
    named = {name: _beside(value, first) for name, value in kwargs.items()}
    with torch.no_grad():
        sample = func(*(one for _, one in pairs), **{name: one for name, (_, one) in named.items()})
    if sample is first.sample:  # nothing to cast or to make contiguous
        return first
    _require(isinstance(sample, Tensor) and sample.shape == first.sample.shape and sample.device == first.device)
    nodes = {name: node for name, (node, _) in named.items()}
    call = row_program.Call(func, [node for node, _ in pairs], nodes, row_program.read_autocast(first.device.type))
    return first.like(call, sample, first.lead, first.class_dim, is_view=False)


def _beside(value: Any, logits: LazyLogits) -> tuple[Any, Any]:
    """Return an argument as a node, and as what it is for no token."""
    if not isinstance(value, Tensor):
        return value, value
    lead, num_classes = logits.lead, logits.sample.shape[-1]
    if isinstance(value, LazyLogits):
        _require(value.lead == lead and value.class_dim == logits.class_dim)
        return value.node, value.sample
    if not value.dim():
        return row_program.Leaf(value, has_rows=False), value
    _require(_is_last(logits) and value.dim() <= logits.ndim and value.shape[-1] in (1, num_classes))
    if value.numel() == value.shape[-1]:  # [1, V]: not a copy for each token
        return row_program.Leaf(value.flatten(), has_rows=False), value.flatten()
    _require(all(size in (1, other) for size, other in zip(value.shape[-2::-1], lead[::-1], strict=False)))
    return row_program.Leaf(value.expand(*lead, value.shape[-1]), has_rows=True), value.new_empty(0, value.shape[-1])


def normalise(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Note ``softmax`` or ``log_softmax`` along the classes."""
    named = _bind(("input", "dim", "dtype"), args, kwargs)
    logits, dim, dtype = named["input"], named.get("dim"), named.get("dtype")
    _require(isinstance(dim, int) and dim % logits.ndim == logits.class_dim)
    return each(getattr(torch, func.__name__), (logits, -1), {"dtype": dtype})


def reduce(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute what is left of each token's logits: a sum, a largest one, some chosen ones."""
    name = func.__name__
    named = _bind(_PARAMETERS.get(name, ("input", "dim", "keepdim")), args, kwargs)
    logits = named.pop("input")
    _require(isinstance(logits, LazyLogits))
    dim = named.pop("axis", named.pop("dim", -1 if name == "topk" else None))
    if name in ("sum", "mean") and dim is None and named.keys() <= {"dtype"}:
        total = logits.reduce_to_sum(torch.sum, logits.node, -1, **named)
        return total / logits.numel() if name == "mean" else total
    if isinstance(dim, Sequence) and len(dim) == 1:
        (dim,) = dim
    _require(isinstance(dim, int) and dim % logits.ndim == logits.class_dim)
    is_kept = bool(named.pop("keepdim", name in _PARAMETERS))
    if isinstance(named.get("index"), Tensor):
        _require(_is_last(logits) and named["index"].shape[:-1] == logits.lead)
        named["index"] = row_program.Leaf(named["index"], has_rows=True)
    if name not in _PARAMETERS:
        named["keepdim"] = True
    found = [one.view(*logits.lead, -1) for one in logits.reduce(getattr(torch, name), logits.node, dim=-1, **named)]
    found = [one.movedim(-1, logits.class_dim) if is_kept else one.squeeze(-1) for one in found]
    return found[0] if len(found) == 1 else getattr(torch.return_types, name)(found)


_PARAMETERS = {"topk": ("input", "k", "dim", "largest", "sorted"), "gather": ("input", "dim", "index")}
_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_KL_DIV = ("input", "target", "size_average", "reduce", "reduction", "log_target")
_OLD = {"size_average", "reduce"}  # before there was reduction=


def classify(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``cross_entropy`` and ``nll_loss``."""
    named = _bind(_CROSS_ENTROPY, args, kwargs)
    logits, target, reduction = named.pop("input"), named.pop("target"), named.pop("reduction", "mean")
    is_lazy = isinstance(logits, LazyLogits) and logits.class_dim == 1 and isinstance(target, Tensor)
    _require(is_lazy and not named.keys() & _OLD)
    is_soft = target.is_floating_point()
    _require(target.shape == (logits.shape if is_soft else logits.lead))  # else torch says what is wrong
    _require(not is_soft or func.__name__ == "cross_entropy")
    weight = named.pop("weight", None)
    if weight is not None:
        named["weight"] = row_program.Leaf(weight, has_rows=False)
    with torch.no_grad():  # under autocast another than that of the logits
        dtype = func(logits.sample, torch.empty(0, dtype=torch.int64, device=logits.device), reduction="sum").dtype
    function = partial(_classify, getattr(F, func.__name__))
    rows = _row_node(target.movedim(1, -1) if is_soft else target.unsqueeze(-1))
    found = _reduce_losses(logits, function, rows, named, reduction)
    if reduction == "mean" and is_soft:
        found = found / logits.lead.numel()
    elif reduction == "mean":
        counted = target != named.get("ignore_index", -100)
        count = counted.sum()
        if weight is not None:
            count = (weight.detach()[target.masked_fill(~counted, 0)] * counted).sum()
        # Of no token the loss is NaN, but its gradient is zero: it goes past the weights.
        found = torch.where(count != 0, found / count.masked_fill(count == 0, 1), math.nan)
    return found.to(dtype)


def _reduce_losses(
    logits: LazyLogits, function: Any, target: Any, options: Mapping[str, Any], reduction: str
) -> Tensor:
    if reduction != "none":
        total: Tensor = logits.reduce_to_sum(function, logits.node, target, **options)
        return total
    (losses,) = logits.reduce(function, logits.node, target, **options)
    return losses.view(logits.lead)


def _row_node(value: Tensor) -> Any:
    _require(not isinstance(value, LazyLogits) or _is_last(value))
    return value.node if isinstance(value, LazyLogits) else row_program.Leaf(value, has_rows=True)


def _classify(function: Any, logits: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    # What each token adds to a loss is rounded once, in the sum.
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    target = target.to(wide.dtype) if target.is_floating_point() else target.squeeze(-1)
    weight = None if weight is None else weight.to(wide.dtype)
    losses: Tensor = function(wide, target, weight, reduction="none", **options)
    return losses


def diverge(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``kl_div`` of two heads' log-probabilities, or of one beside a tensor."""
    named = _bind(_KL_DIV, args, kwargs)
    one, other, reduction = named["input"], named["target"], named.get("reduction", "mean")
    ours = one if isinstance(one, LazyLogits) else other
    _require(not named.keys() & _OLD and reduction != "none" and one.shape == other.shape and _is_last(ours))
    nodes = _row_node(one), _row_node(other)
    divergence = partial(F.kl_div, reduction="none", log_target=named.get("log_target", False))
    total = ours.reduce_to_sum(lambda rows, target: divergence(rows, target).sum(-1), *nodes)
    size = {"batchmean": one.shape[0], "mean": one.numel()}.get(reduction, 1)
    return total / size if size != 1 else total


_TURNS = ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "mT")
_VIEWS = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as")
_CUTS = ("split", "chunk", "unbind", "select", "narrow")
_ARITHMETIC = ("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where", "masked_fill", "lerp")
_OPERATORS = ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__")
_OTHERS = ("__rdiv__", "__div__", "__pow__", "__rpow__", "__neg__", "__abs__", "rsub", "subtract", "multiply", "divide")
_OF_ONE = ("tanh", "exp", "log", "log1p", "expm1", "neg", "abs", "sqrt", "square", "sigmoid", "logsigmoid", "softplus")
_LIMITS = ("clamp", "clamp_min", "clamp_max", "clip", "nan_to_num", "relu", "special_entr", "xlogy", "special_xlogy")
_KINDS = ("contiguous", "float", "double", "half", "bfloat16", "to", "type", "type_as", "clone")
_COMPARISONS = ("eq", "ne", "gt", "lt", "ge", "le", "__eq__", "__ne__", "__gt__", "__lt__", "__ge__", "__le__")
_EACH = (*_ARITHMETIC, *_OPERATORS, *_OTHERS, *_OF_ONE, *_LIMITS, *_KINDS, *_COMPARISONS)
_REDUCING = ("sum", "mean", "logsumexp", "amax", "amin", "argmax", "argmin", "max", "min", "all", "any", *_PARAMETERS)

# Each gets a function of torch and its arguments, of which one is logits; see NeedsWholeError.
FUNCTIONS: dict[str, Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]] = {
    **dict.fromkeys((*_TURNS, *_VIEWS, *_CUTS), view),
    "__getitem__": take_items,
    "detach": cut_off,
    **dict.fromkeys(_EACH, each),
    **dict.fromkeys(("softmax", "log_softmax"), normalise),
    **dict.fromkeys(_REDUCING, reduce),
    **dict.fromkeys(("cross_entropy", "nll_loss"), classify),
    "kl_div": diverge,
}
