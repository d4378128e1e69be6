"""One call of a module tile by tile, and its backward: each tile runs again, and its gradients are added up."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from lightning_vram.core.hooks.stage import exact_only
from lightning_vram.core.random_state.host import DrawnNumbers, HostRandomState
from lightning_vram.core.random_state.surroundings import Surroundings
from lightning_vram.core.tensors.nests import Rebuild, flatten_output
from lightning_vram.techniques.token_tiling.cut_call import CutCall

_T = TypeVar("_T")
_LOW = (torch.float16, torch.bfloat16)
_is_inside: ContextVar[bool] = ContextVar("_is_inside", default=False)


def is_inside() -> bool:
    """Whether a module runs on a tile, or is asked: what is inside of it runs plain."""
    return _is_inside.get()


class Body(nn.Module):
    """Runs a module's plain forward with other parameters in the places of its own, past its hooks.

    Args:
        module: Whose.
        plain: Its forward.
    """

    def __init__(self, module: nn.Module, plain: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.plain = plain
        self.parameters_by_name = {f"module.{name}": one for name, one in module.named_parameters()}

    def forward(self, work: Callable[[], _T]) -> _T:
        """Do some work: where parameters are replaced by what is given to PyTorch's ``functional_call``."""
        return work()

    def having(self, parameters: dict[str, Tensor], work: Callable[[], _T]) -> _T:
        """Return what some work returns, in which the module has other parameters: a millisecond for all tiles.

        Args:
            parameters: By name, as in ``parameters_by_name``.
            work: Calls :meth:`run`.
        """
        token = _is_inside.set(True)
        try:
            return torch.func.functional_call(self, parameters, (work,))  # type: ignore[no-any-return]
        finally:
            _is_inside.reset(token)

    def run(self, arguments: Any) -> tuple[list[Any], Rebuild]:
        """Return the leaves of what the module returns.

        Args:
            arguments: Positional and keyword arguments.
        """
        args, kwargs = arguments
        return flatten_output(self.plain(*args, **kwargs))


class TiledCall:
    """What a call needs to run tile by tile, twice. Holds no tensor of it.

    Args:
        body: Of the module.
        call: How it is cut.
        tile: Tokens.
        devices: Where it computes.
    """

    def __init__(self, body: Body, call: CutCall, tile: int, devices: set[torch.device]) -> None:
        self._body, self._call, self._tile = body, call, tile
        self._surroundings = Surroundings(devices)  # from where each run draws tile by tile
        self._host_random = HostRandomState(DrawnNumbers())
        self._names = list(body.parameters_by_name)
        self.rebuild: Rebuild = tuple

    def __call__(self, tensors: list[Tensor]) -> Any:
        """Return what the module returns for these tensors."""
        parameters = self._body.parameters_by_name.values()
        outputs = _Tiled.apply(self, *tensors, *parameters)  # type: ignore[no-untyped-call]
        return self.rebuild(outputs)  # which is known now

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run each tile without its gradient."""
        inputs, parameters = self._split(tensors)
        outputs = list[Tensor]()

        def run() -> None:
            for start, length in self._call.tiles(self._tile):
                self._run_tile(inputs, outputs, start, length)

        self._body.having(parameters, run)
        self._host_random.settle()
        return outputs

    def _run_tile(self, inputs: list[Tensor], outputs: list[Tensor], start: int, length: int) -> None:
        dim = self._call.dim
        results, self.rebuild = self._body.run(self._call.arguments(self._call.part(inputs, start, length)))
        if not outputs:
            sizes = [(*one.shape[:dim], self._call.num_tokens, *one.shape[dim + 1 :]) for one in results]
            outputs += [one.new_zeros(size) for one, size in zip(results, sizes, strict=True)]
        for output, result in zip(outputs, results, strict=True):
            output.narrow(dim, start, length).copy_(result)

    def backward(self, tensors: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...], needs: Any) -> list[Any]:
        """Return the gradient of each tensor, ``None`` for those that need none, or had no part in it."""
        inputs, parameters = self._split(tensors)
        for parameter, is_needed in zip(parameters.values(), needs[len(inputs) :], strict=True):
            parameter.requires_grad_(is_needed)
        found: list[Tensor | None] = [None] * len(tensors)
        wanted = [place for place, is_needed in enumerate(needs) if is_needed]

        def run() -> None:
            for start, length in self._call.tiles(self._tile):
                parts = self._call.part(inputs, start, length)
                parts = [one.detach().requires_grad_(need) for one, need in zip(parts, needs, strict=False)]
                leaves = [*parts, *parameters.values()]
                made = self._differentiate(parts, [leaves[place] for place in wanted], gradients, start, length)
                for place, part in zip(wanted, made, strict=bool(made)):
                    self._take(found, place, part, tensors[place], start, length)
                del parts, leaves, made  # lest they are there while the next tile runs

        with self._surroundings.as_they_were(), self._host_random, exact_only, torch.enable_grad():
            self._body.having(parameters, run)
        return [None if sum_ is None else sum_.to(one.dtype) for sum_, one in zip(found, tensors, strict=True)]

    def _differentiate(
        self,
        parts: list[Tensor],
        leaves: list[Tensor],
        gradients: tuple[Tensor | None, ...],
        start: int,
        length: int,
    ) -> Sequence[Tensor | None]:
        """Return the gradients of a tile; none where nothing of it has one."""
        results, _ = self._body.run(self._call.arguments(parts))
        pairs = [
            (get_gradient_edge(result), gradient.narrow(self._call.dim, start, length))
            for result, gradient in zip(results, gradients, strict=True)
            if gradient is not None and result.requires_grad
        ]
        del results  # nobody reads them
        if not pairs:
            return ()
        ends, with_respect = zip(*pairs, strict=True)
        return torch.autograd.grad(ends, leaves, with_respect, allow_unused=True)

    def _take(
        self, found: list[Tensor | None], place: int, part: Tensor | None, whole: Tensor, start: int, length: int
    ) -> None:
        if part is None:
            return
        total = found[place]
        if place >= len(self._call.places) or not self._call.is_cut[place]:
            found[place] = _add(total, part)
            return
        if total is None:
            total = found[place] = torch.zeros_like(whole)
        total.narrow(self._call.dim, start, length).copy_(part)

    def _split(self, tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return inputs, and parameters: others, lest autocast keeps casts of these."""
        num_inputs = len(self._call.places)
        parameters = (one.detach() for one in tensors[num_inputs:])
        return list(tensors[:num_inputs]), dict(zip(self._names, parameters, strict=True))


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
        outputs = call.forward(*tensors)
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "TokenTiling: gradients of gradients (create_graph=True) are not computed in tiles. Leave TokenTiling "
                "out."
            )
        return None, *ctx.call.backward(ctx.saved_tensors, gradients, ctx.needs_input_grad[1:])
