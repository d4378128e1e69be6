"""Runs of a module on some tokens of its input."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.rollback.forward_state import ForwardState
from lightning_vram.core.tensors.versions import version_of
from lightning_vram.private_names.torch.dispatch import TorchDispatchMode
from lightning_vram.private_names.torch.operators import TO_COPY
from lightning_vram.techniques.token_tiling.cut_call import CutCall
from lightning_vram.techniques.token_tiling.operator_proof import DRAWS, NotAlone
from lightning_vram.techniques.token_tiling.tiled_call import Body

_NUM_TOKENS = 64  # that are looked at
_DROPOUT = torch.ops.aten.native_dropout.default
_CONVOLUTIONS = frozenset(["convolution", "conv1d", "conv2d", "conv3d"])


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by ones, and counts them; lets no index come of what is no number."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_drawn: list[int] = []
        self._num_tokens = num_tokens  # that are looked at. What reaches further would not be seen to mix them.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is TO_COPY and not kwargs.get("dtype", torch.float32).is_floating_point:
            args = (args[0].nan_to_num(0, 0, 0) if args[0].is_floating_point() else args[0], *args[1:])
        name = func.overloadpacket.__name__
        if "attention" in name:  # of which some say that they draw
            raise NotAlone("has attention inside")
        if (name in _CONVOLUTIONS or name == "roll") and 2 * _reach(name, args) > self._num_tokens:
            raise NotAlone(f"mixes distant tokens in {name}")
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is _DROPOUT:
            self.num_drawn.append(args[0].numel())
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name not in DRAWS:
            raise NotAlone(f"draws random numbers in {name}")
        result = func(*args, **kwargs)
        self.num_drawn.append(result.numel())
        return result.fill_(1)


class Runs:
    """Runs of a module on some tokens."""

    def __init__(self, body: Body, call: CutCall, tensors: list[Tensor]) -> None:
        self._body, self._call = body, call
        self.num_tokens = min(call.num_tokens, _NUM_TOKENS) // 2 * 2
        self.device = next(one.device for one, is_cut in zip(tensors, call.is_cut, strict=True) if is_cut)
        chosen = torch.linspace(0, call.num_tokens - 1, self.num_tokens, device=self.device).long()
        plain = [one.detach() for one in tensors]
        self._tensors = call.cut(plain, lambda one: one.index_select(call.dim, chosen.to(one.device)))
        self._parameters = {
            name: one.detach() if one.any() else torch.randn_like(one) for name, one in body.parameters_by_name.items()
        }

    def run(self, order: Tensor, nan_at: int | None = None) -> tuple[list[Tensor], list[int]]:
        """Return results for the tokens at ``order``, tokens first, and how many random numbers were drawn."""
        dim, num = self._call.dim, len(order)
        tensors = self._call.cut(self._tensors, lambda one: one.index_select(dim, order))
        tensors = [one.clone() for one in tensors]
        if nan_at is not None:
            for one in self._call.cut(tensors, lambda one: one.select(dim, nan_at)):
                if one.is_floating_point() and not any(one is whole for whole in tensors):
                    one.fill_(torch.nan)
        before = [(one.clone(), version_of(one)) for one in tensors]
        with _Watch(self.num_tokens) as watch:
            results, _ = self._run(self._call.arguments(tensors))
        if not all(
            version_of(one) == then and is_same(one, copy) for one, (copy, then) in zip(tensors, before, strict=True)
        ):
            raise NotAlone("writes to its input")
        if not results or not all(isinstance(one, Tensor) for one in results):
            raise NotAlone("returns values other than tensors")
        if any(one.dim() <= dim or one.shape[dim] != num for one in results):
            raise NotAlone("returns a tensor with another number of tokens than its input")
        return [one.movedim(dim, 0) for one in results], watch.num_drawn

    def _run(self, arguments: Any) -> Any:
        return self._body.having(self._parameters, lambda: self._body.run(arguments))

    def gradients(self, order: Tensor) -> list[Tensor | None]:
        """Return the gradients of what has tokens, tokens first, of some that the results have."""
        dim = self._call.dim
        tensors = self._call.cut(self._tensors, lambda one: one.index_select(dim, order))
        chosen = [one for one, is_cut in zip(tensors, self._call.is_cut, strict=True) if is_cut and _has_gradient(one)]
        with self._grad():
            inputs = [one.requires_grad_() for one in chosen]
            results, _ = self._run(self._call.arguments(tensors))
            ends = [one for one in results if one.requires_grad]
            gradients = [_numbers(one, self.num_tokens, dim, order) for one in ends]
            found = torch.autograd.grad(ends, inputs, gradients, allow_unused=True) if ends else [None] * len(inputs)
        return [None if one is None else one.movedim(dim, 0) for one in found]

    def look_for_graphs(self, state: ForwardState) -> None:
        """Refuse what keeps a graph of its call somewhere, and what computes with one of others."""
        is_kept = state.run(self._mark_and_run)
        if is_kept() is not None:
            gc.collect()  # it may be no more than a cycle
        if is_kept() is not None:
            raise NotAlone("stores something of its call outside itself, such as a loss")
        if state.run(self._needs_gradient):
            raise NotAlone("uses a tensor that requires a gradient and is neither its parameter nor its input")

    def _needs_gradient(self) -> bool:
        results: list[Any] = []
        with suppress(RuntimeError), self._grad():
            results, _ = self._run(self._call.arguments([one.clone() for one in self._tensors]))
        return any(isinstance(one, Tensor) and one.requires_grad for one in results)

    def _mark_and_run(self) -> weakref.ref[Any]:
        """Return what lives as long as the graph of a run."""
        token = _Token()
        with suppress(RuntimeError), self._grad():  # of the next runs the reason can be told
            marked = [
                _mark(token, one.clone().requires_grad_()) if _has_gradient(one) else one for one in self._tensors
            ]
            self._run(self._call.arguments(marked))
        return weakref.ref(token)

    @contextmanager
    def _grad(self) -> Iterator[None]:
        """Make a graph of the run, of which a checkpoint around it knows nothing."""
        inner = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, Tensor.detach)  # else results hold themselves
        with torch.enable_grad(), inner, _Watch(self.num_tokens):
            yield


class _Token:
    """Lives as long as a graph."""


class _Marked(torch.autograd.Function):
    """The same tensor, in a graph that holds a token."""

    @staticmethod
    def forward(ctx: Any, token: _Token, tensor: Tensor) -> Tensor:
        ctx.token = token
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *gradients


_mark: Any = _Marked.apply


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _numbers(like: Tensor, num_tokens: int, dim: int, order: Tensor) -> Tensor:
    """Return random numbers, the same for each token in any order."""
    shape = list(like.movedim(dim, 0).shape)
    made = torch.randn(num_tokens, *shape[1:], generator=torch.Generator().manual_seed(0))
    return made.to(like.device, like.dtype)[order].movedim(0, dim)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal to the bit, with what is no number in the same places."""
    is_float = one.is_floating_point()
    return torch.equal(one, other) or (is_float and one.shape == other.shape and one.allclose(other, 0, 0, True))  # noqa: FBT003


def _reach(name: str, args: Any) -> Any:
    """Return how far a convolution looks, or a roll moves."""
    if name == "roll":
        return max(map(abs, args[1]))
    sizes, dilation = args[1].shape[2:], args[5] if len(args) > 5 else [1]
    return max((size - 1) * max(dilation) for size in sizes)
