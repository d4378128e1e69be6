"""One call of a module tile by tile, and its backward: each tile runs again, and gradients are summed."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lightning_vram.core.hooks import exact_only
from lightning_vram.core.recomputed_saves import SavedSamples, divergence_error
from lightning_vram.core.rollback import ForwardState
from lightning_vram.core.tensors.properties import PLAIN_TYPES, is_strided
from lightning_vram.private_names.torch import retains_graph, without_autocast

_VALUES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_FEWEST_ROWS = 1024
_T = TypeVar("_T")
_LOW = (torch.float16, torch.bfloat16)
_is_inside: ContextVar[bool] = ContextVar("_is_inside", default=False)


def is_inside() -> bool:
    """Whether a module runs on a tile, or is asked: what is inside of it runs plain."""
    return _is_inside.get()


class Body(nn.Module):
    """A call of a module that gets one tensor ``hidden``, with other parameters in the places of its own.

    Tokens are along the last dimension but one: [B, T, D], or [T, D]. Whatever is called batch and token does not
    matter, as independence along this dimension is what is proven. The body holds none of the call's tensors.
    """

    def __init__(
        self, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self.module = module
        self.original = original
        self.num_args, self.names = len(args), tuple(kwargs)
        values = (*args, *kwargs.values())
        self.place = next(place for place, one in enumerate(values) if isinstance(one, Tensor))
        self.values = (*values[: self.place], None, *values[self.place + 1 :])
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

    def run(self, hidden: Tensor) -> Any:
        """Return what the module returns, past its hooks."""
        values = [*self.values]
        values[self.place] = hidden
        return self.original(*values[: self.num_args], **dict(zip(self.names, values[self.num_args :], strict=True)))


def find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the only tensor among arguments, if it has tokens, and no other argument could hold one."""
    values = (*args, *kwargs.values())
    tensors = [one for one in values if not isinstance(one, _VALUES)]
    if len(tensors) != 1 or type(tensors[0]) not in PLAIN_TYPES:
        return None
    hidden: Tensor = tensors[0]
    has_tokens = is_strided(hidden) and hidden.is_floating_point() and hidden.dim() >= 2 and hidden.numel() > 0
    return hidden if has_tokens else None


def tile_length(hidden: Tensor, tile: int | Literal["auto"]) -> int:
    """Return the tokens of a tile. ``"auto"``: at least 1,024 rows, and as many as a token has numbers (ALST)."""
    if tile != "auto":
        return tile
    num_rows, width = hidden.shape[:-1].numel(), hidden.shape[-1]
    return -(-hidden.shape[-2] // -(-num_rows // max(width, _FEWEST_ROWS)))


_Window = Callable[[Tensor], Tensor]  # returns the tile's part of a tensor
_Take = Callable[[list[Tensor], list[Tensor], _Window], None]  # gets input and parameters of a tile, and its result


@dataclass
class TiledCall:
    """Runs a call tile by tile, twice. Holds none of its tensors, but the module's state until the backward."""

    body: Body
    tile: int
    name: str  # of the module, for messages
    state: ForwardState | None = None  # from which each run goes tile by tile; ``None`` without gradients
    samples: SavedSamples | None = None  # of what the forward saves for backward; ``None`` in calls not compared

    def __call__(self, hidden: Tensor) -> Any:
        """Return what the module returns."""
        return _Tiled.apply(self, hidden, *self.body.parameters_by_name.values())  # type: ignore[no-untyped-call]

    def run(
        self, tensors: tuple[Tensor, ...], needs: Sequence[bool], samples: SavedSamples | None, take: _Take
    ) -> None:
        """Call ``take`` for each tile. Parameters are others, lest autocast keeps casts of these."""
        hidden, pairs = tensors[0], zip(tensors[1:], needs[1:], strict=True)
        parameters = [one.detach().requires_grad_(need) for one, need in pairs]
        dim, num_tokens = hidden.dim() - 2, hidden.shape[-2]

        def run() -> None:
            for start in range(0, num_tokens, self.tile):
                window = partial(torch.narrow, dim=dim, start=start, length=min(self.tile, num_tokens - start))
                whole = window(hidden).contiguous()  # in one piece: modules make views of it
                part = whole.detach().requires_grad_(needs[0])
                with nullcontext() if samples is None else _taking(samples):
                    results = [self.body.run(part)]
                take([part, *parameters], results, window)
                del part, whole, results  # lest they are there while the next tile runs

        self.body.having(dict(zip(self.body.parameters_by_name, parameters, strict=True)), run)


def _taking(samples: SavedSamples) -> saved_tensors_hooks:

    def pack(tensor: Tensor) -> Tensor:
        samples.take(tensor)
        return tensor.detach()  # else a result would hold its own node

    return saved_tensors_hooks(pack, Tensor.detach)


def _add_gradients(
    found: list[Any], gradient: Tensor, leaves: list[Tensor], results: list[Tensor], window: _Window
) -> None:
    """Put the gradient of a tile's input in its place, and add up those of parameters: in float32 what is in 16 bit."""
    if not results[0].requires_grad:
        return
    end = get_gradient_edge(results.pop())  # nobody reads the result
    wanted = {place: leaf for place, leaf in enumerate(leaves) if leaf.requires_grad}
    with without_autocast():  # as backwards run, also of an fp32 region
        parts: Sequence[Tensor | None] = torch.autograd.grad(
            [end], [*wanted.values()], [window(gradient)], allow_unused=True
        )
    for place, part in zip(wanted, parts, strict=True):
        if part is None:
            continue
        if place == 0:
            window(found[0]).copy_(part)
        elif found[place] is not None:
            found[place].add_(part)
        else:  # a copy: what autograd returns may be shared
            dtype = torch.float32 if part.dtype in _LOW else part.dtype
            found[place] = part.to(dtype, copy=True, memory_format=torch.contiguous_format)


class _Tiled(torch.autograd.Function):
    """One node for all tiles: the hooks of DDP and FSDP2 see one gradient of each parameter."""

    @staticmethod
    def forward(ctx: Any, call: TiledCall, *tensors: Tensor) -> Tensor | None:
        """Run each tile without a gradient; or with one, of which samples are taken and nothing is kept."""
        ctx.call = call
        ctx.save_for_backward(*tensors)
        dim, output = tensors[0].dim() - 2, cast("Tensor | None", None)

        def take(leaves: list[Tensor], results: list[Tensor], window: _Window) -> None:
            nonlocal output
            result = results[0].detach()
            if output is None:
                output = result.new_zeros((*result.shape[:dim], tensors[0].shape[dim], *result.shape[dim + 1 :]))
            window(output).copy_(result)

        # Autocast keeps casts of what needs a gradient, which would serve nobody else.
        needs = [need and call.samples is not None for need in ctx.needs_input_grad[1:]]
        with torch.set_grad_enabled(call.samples is not None):
            call.run(tensors, needs, call.samples, take)
        if call.state is not None:
            call.state.settle()
        if call.samples is not None:
            call.samples.settle()
            torch.clear_autocast_cache()
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("TokenTiling does not support gradients of gradients (create_graph=True). Leave it out.")
        tensors, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad[1:]
        if not retains_graph():
            ctx.call = None  # its state holds what the module held
        samples = SavedSamples(first=call.samples) if call.samples is not None else None
        found: list[Any] = [None] * len(tensors)
        if needs[0]:
            found[0] = torch.zeros_like(tensors[0])
        take = partial(_add_gradients, found, gradient)
        with exact_only, torch.enable_grad():
            call.state.run(partial(call.run, tensors, needs, samples, take))
        if samples is not None and (difference := samples.difference()) is not None:
            raise divergence_error(call.name, difference, "Leave it out with TokenTiling(layers=...).")
        return None, *(sum_ if sum_ is None else sum_.to(one.dtype) for sum_, one in zip(found, tensors, strict=True))
