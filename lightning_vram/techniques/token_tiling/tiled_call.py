"""One call of a module tile by tile, and its backward: each tile runs again, and gradients are summed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lightning_vram.core.hooks import exact_only
from lightning_vram.core.recomputed_saves import SavedSamples, divergence_error
from lightning_vram.core.rollback import ForwardState
from lightning_vram.core.tensors.properties import PLAIN_TYPES, Rebuild, flatten_arguments, flatten_output, is_strided
from lightning_vram.private_names.torch import retains_graph, without_autocast

# Tokens are along the last dimension but one of the first floating tensor: [B, T, D], or [T, D]. Whatever is called
# batch and token does not matter, as independence along this dimension is what is proven. Other tensors that begin with
# the same sizes ([B, T]) are cut along with it; those that do not are handed on whole.

_VALUES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_FEWEST_ROWS = 1024
MIN_DIMS = 2


@dataclass(frozen=True)
class CutCall:
    """How a call is cut. Holds no tensor."""

    values: tuple[Any, ...]  # leaves of the arguments; ``None`` in the places of tensors
    rebuild: Rebuild  # makes arguments of leaves
    places: tuple[int, ...]  # of tensors
    is_cut: tuple[bool, ...]  # whether each of them has tokens
    dim: int  # of tokens
    num_tokens: int  # T
    num_rows: int  # tokens of the whole batch
    width: int  # D

    def tile(self, tile: int | Literal["auto"]) -> int:
        """Return the tokens of a tile. ``"auto"``: at least 1,024 rows, and as many as a token has numbers (ALST)."""
        if tile != "auto":
            return tile
        num_tiles = -(-self.num_rows // max(self.width, _FEWEST_ROWS))
        return -(-self.num_tokens // num_tiles)

    def tiles(self, tile: int) -> Iterator[tuple[int, int]]:
        """Yield first token and length of each tile."""
        for start in range(0, self.num_tokens, tile):
            yield start, min(tile, self.num_tokens - start)

    def cut(self, tensors: Sequence[Tensor], take: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Apply ``take`` to tensors that have tokens."""
        return [take(tensor) if is_cut else tensor for tensor, is_cut in zip(tensors, self.is_cut, strict=True)]

    def part(self, tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        """Return a tile of each tensor, in one piece: modules make views of their inputs."""
        return self.cut(tensors, lambda one: one.narrow(self.dim, start, length).contiguous())

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Return arguments with these tensors."""
        leaves = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return self.rebuild(leaves)


def cut_call(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[CutCall, list[Tensor]] | str:
    """Return how a call can be cut, and its tensors; or why it cannot."""
    leaves, rebuild = flatten_arguments(arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_VALUES))]
    if others:
        return f"gets a {type(others[0]).__name__}"
    if any(type(tensor) not in PLAIN_TYPES or not is_strided(tensor) for tensor in tensors):
        return "gets a tensor subclass or sparse tensor"
    first = next((one for one in tensors if one.is_floating_point() and one.dim() >= MIN_DIMS), None)
    if first is None or not first.numel():
        return "gets no floating-point tensor with tokens"
    dim = first.dim() - 2
    begin = first.shape[: dim + 1]
    values = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    is_cut = tuple(tensor.shape[: dim + 1] == begin for tensor in tensors)
    call = CutCall(values, rebuild, tuple(places), is_cut, dim, begin[dim], begin.numel(), first.shape[-1])
    return call, tensors


_T = TypeVar("_T")
_LOW = (torch.float16, torch.bfloat16)
_is_inside: ContextVar[bool] = ContextVar("_is_inside", default=False)


def is_inside() -> bool:
    """Whether a module runs on a tile, or is asked: what is inside of it runs plain."""
    return _is_inside.get()


class Body(nn.Module):
    """Runs a module's original forward with other parameters in the places of its own, past its hooks."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.original = original
        self.parameters_by_name = {f"module.{name}": one for name, one in module.named_parameters()}

    def forward(self, work: Callable[[], _T]) -> _T:
        """Do some work: ``functional_call`` replaces parameters only in a forward."""
        return work()

    def having(self, parameters: dict[str, Tensor], work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns, which calls :meth:`run` with these parameters: a millisecond for all tiles."""
        token = _is_inside.set(True)
        try:
            return torch.func.functional_call(self, parameters, (work,))  # type: ignore[no-any-return]
        finally:
            _is_inside.reset(token)

    def run(self, arguments: Any) -> tuple[list[Any], Rebuild]:
        """Return the leaves of what the module returns."""
        args, kwargs = arguments
        return flatten_output(self.original(*args, **kwargs))


_Take = Callable[[list[Tensor], list[Tensor], int, int], None]  # gets leaves and results of a tile


@dataclass
class TiledCall:
    """Runs a call tile by tile, twice. Holds none of its tensors, but the module's state until the backward."""

    body: Body
    call: CutCall
    tile: int
    name: str  # of the module, for messages
    state: ForwardState | None = None  # from which each run goes tile by tile; ``None`` without gradients
    samples: SavedSamples | None = None  # of what the forward saves for backward; ``None`` in calls not compared
    rebuild: Rebuild = tuple  # makes the output of its leaves

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return what the module returns for these tensors."""
        outputs = _Tiled.apply(self, *tensors, *self.body.parameters_by_name.values())  # type: ignore[no-untyped-call]
        return self.rebuild(outputs)  # which is known now

    def forward(self, tensors: tuple[Tensor, ...], needs: Sequence[bool]) -> list[Tensor]:
        """Run each tile without a gradient; or with one, of which samples are taken and nothing is kept."""
        outputs, dim = list[Tensor](), self.call.dim

        def take(leaves: list[Tensor], results: list[Tensor], start: int, length: int) -> None:
            if not outputs:
                sizes = [(*one.shape[:dim], self.call.num_tokens, *one.shape[dim + 1 :]) for one in results]
                outputs.extend(one.new_zeros(size) for one, size in zip(results, sizes, strict=True))
            for output, result in zip(outputs, results, strict=True):
                output.narrow(dim, start, length).copy_(result.detach())

        has_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # casts of these parameters would serve nobody else
        try:
            with torch.set_grad_enabled(self.samples is not None):
                self._run(tensors, needs, self.samples, take)
        finally:
            torch.set_autocast_cache_enabled(has_cache)
        if self.state is not None:
            self.state.settle()
        if self.samples is not None:
            self.samples.settle()
        return outputs

    def backward(
        self, tensors: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...], needs: Sequence[bool]
    ) -> list[Any]:
        """Return the gradient of each tensor, ``None`` for those that need none, or had no part in it."""
        assert self.state is not None
        samples = SavedSamples(first=self.samples) if self.samples is not None else None
        found: list[Tensor | None] = [None] * len(tensors)
        wanted = [place for place, is_needed in enumerate(needs) if is_needed]
        has_tokens = dict(enumerate(self.call.is_cut))

        def take(leaves: list[Tensor], results: list[Tensor], start: int, length: int) -> None:
            pairs = [
                (get_gradient_edge(result), gradient.narrow(self.call.dim, start, length))
                for result, gradient in zip(results, gradients, strict=True)
                if gradient is not None and result.requires_grad
            ]
            results.clear()  # nobody reads them
            if not pairs:
                return
            ends, of_ends = zip(*pairs, strict=True)
            with without_autocast():  # as backwards run, also of an fp32 region
                parts: Sequence[Tensor | None] = torch.autograd.grad(
                    ends, [leaves[place] for place in wanted], of_ends, allow_unused=True
                )
            for place, part in zip(wanted, parts, strict=True):
                total = found[place]
                if part is not None and has_tokens.get(place):
                    found[place] = total = torch.zeros_like(tensors[place]) if total is None else total
                    total.narrow(self.call.dim, start, length).copy_(part)
                elif part is not None:
                    found[place] = _add(total, part)

        with exact_only, torch.enable_grad():
            self.state.run(lambda: self._run(tensors, needs, samples, take))
        difference = samples.difference() if samples is not None else None
        if difference is not None:
            raise divergence_error(self.name, difference, "Leave it out with TokenTiling(layers=...).")
        return [None if sum_ is None else sum_.to(one.dtype) for sum_, one in zip(found, tensors, strict=True)]

    def _run(
        self, tensors: tuple[Tensor, ...], needs: Sequence[bool], samples: SavedSamples | None, take: _Take
    ) -> None:
        """Call ``take`` for each tile. Parameters are others, lest autocast keeps casts of these."""
        num_inputs = len(self.call.places)
        parameters = [one.detach().requires_grad_(need) for one, need in zip(tensors, needs, strict=True)][num_inputs:]

        def run() -> None:
            for tile in self.call.tiles(self.tile):
                parts = zip(self.call.part(tensors[:num_inputs], *tile), needs, strict=False)
                inputs = [one.detach().requires_grad_(need) for one, need in parts]
                with nullcontext() if samples is None else _taking(samples):
                    results, self.rebuild = self.body.run(self.call.arguments(inputs))
                take([*inputs, *parameters], results, *tile)
                del parts, inputs, results  # lest they are there while the next tile runs

        self.body.having(dict(zip(self.body.parameters_by_name, parameters, strict=True)), run)


def _taking(samples: SavedSamples) -> saved_tensors_hooks:

    def pack(tensor: Tensor) -> Tensor:
        samples.take(tensor)
        return tensor.detach()  # else a result would hold its own node

    return saved_tensors_hooks(pack, Tensor.detach)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    """Add up in float32 what is in 16 bit."""
    if total is not None:
        return total.add_(part)
    dtype = torch.float32 if part.dtype in _LOW else part.dtype
    return part.to(dtype, copy=True, memory_format=torch.contiguous_format)  # what autograd returns may be shared


class _Tiled(torch.autograd.Function):
    """One node for all tiles: the hooks of DDP and FSDP2 see one gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        outputs = call.forward(tensors, ctx.needs_input_grad[1:])
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("TokenTiling does not support gradients of gradients (create_graph=True). Leave it out.")
        tensors, call = ctx.saved_tensors, ctx.call
        if not retains_graph():
            ctx.call = None  # its state holds what the module held
        return None, *call.backward(tensors, gradients, ctx.needs_input_grad[1:])
