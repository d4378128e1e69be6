"""Does a module treat tokens alone? For tensors without values, its operators are checked."""

from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.operators.exactness import base_name, is_pointwise, iterate_tensors
from lightning_vram.core.operators.families import Family, family_of, iterate_written
from lightning_vram.core.tensors.nests import flatten_arguments
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.private_names.torch.dispatch import ASK_DEVICE, TorchDispatchMode, detect_fake_mode
from lightning_vram.private_names.torch.operators import TO_COPY, UNSAFE_VIEW, given_arguments
from lightning_vram.techniques.token_tiling.cut_call import CutCall
from lightning_vram.techniques.token_tiling.tiled_call import Body

DRAWS = frozenset(["bernoulli_", "bernoulli", "rand", "rand_like", "randn", "randn_like", "uniform_", "normal_"])
_PRIMES = (1009, 1013, 1019, 1021, 1031, 1033)
_KEEPING_ROWS = {  # if the dimension is there afterwards
    *("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"),
    *("sum", "mean", "prod", "amax", "amin", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "logsumexp"),
    *("argmax", "argmin", "any", "all", "max", "min", "glu", "native_dropout"),
    *("empty_like", "new_empty", "zeros_like", "ones_like", "full_like"),
}
_OTHER_VIEWS = frozenset(["as_strided", "unfold", "diagonal"])
_NAMING_SIZES = frozenset(["view", "expand", "new_empty"])


class NotAlone(Exception):  # noqa: N818 - a reason
    """Says why a module does not treat tokens alone."""


def ask_operators(body: Body, call: CutCall, tensors: list[Tensor]) -> str:
    """Return how it was proven that a module treats tokens alone, or raise ``NotAlone``; reads shapes and types only.

    The number of tokens becomes a large prime, so that exactly one dimension of a tensor is a multiple of it if it has
    tokens. Each operator must be of a kind that treats rows alone as long as this dimension stays. Sums over tokens
    lose it, comparisons of tokens have two, a table of positions gets one out of nothing. A second prime finds
    computations with the number of tokens. What is refused here may still be proven by values: estimates are then too
    high.
    """
    parameters = {name: one.detach() for name, one in body.parameters_by_name.items()}
    sizes = {size for one in (*tensors, *parameters.values()) for size in one.shape}
    traces = []
    for prime in [one for one in _PRIMES if all(size % one for size in sizes)][:2]:
        parts = call.cut(
            tensors, lambda one, to=prime: one.new_empty((*one.shape[: call.dim], to, *one.shape[call.dim + 1 :]))
        )  # type: ignore[misc]
        parts = [part if is_cut else part.detach() for part, is_cut in zip(parts, call.is_cut, strict=True)]
        with detect_fake_mode(parts) or nullcontext(), _Watch(prime, parts) as watch:
            results, _ = body.having(parameters, lambda parts=parts: body.run(call.arguments(parts)))  # type: ignore[misc]
        if not results or not all(isinstance(one, Tensor) for one in results):
            raise NotAlone("returns values other than tensors")
        if any(one.dim() <= call.dim or one.shape[call.dim] != prime for one in results):
            raise NotAlone("returns a tensor with another number of tokens than its input")
        traces.append(watch.trace)
    if len(traces) != 2 or traces[0] != traces[1]:
        raise NotAlone("depends on the number of tokens")
    return "by its operators"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that may not treat tokens alone; notes each, but for how many tokens there are."""

    def __init__(self, prime: int, inputs: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._prime = prime
        self._inputs = {storage_address(one) for one in inputs}
        self.trace: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASK_DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        name, is_view = func.overloadpacket.__name__, func is UNSAFE_VIEW or base_name(func) == "view"
        before = {self._tokens(one, has_suffix=is_view) for one in iterate_tensors((*args, *kwargs.values()))} - {None}
        for one in iterate_written(func, args, kwargs):
            if self._tokens(one) is None or storage_address(one) in self._inputs:
                raise NotAlone(f"writes to its input in {name}")
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if not before and (is_drawn or name == "lift_fresh"):
            raise NotAlone(f"creates values in {name}")
        if before and not (self._keeps_rows(func, args, kwargs) or (is_drawn and name in DRAWS)):
            raise NotAlone(f"has {name}")
        result = func(*args, **kwargs)
        made = list(iterate_tensors((result,)))
        if len(before) > 1 or {self._tokens(one, has_suffix=is_view) for one in made} != (before or {None}):
            raise NotAlone(f"mixes tokens in {name}")
        leaves = () if is_view or name in _NAMING_SIZES else flatten_arguments((args, kwargs))[0]
        values = [repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
        sizes = [[-(size // self._prime) if size % self._prime == 0 else size for size in one.shape] for one in made]
        self.trace.append((func, values, sizes))
        return result

    def _tokens(self, one: Tensor, *, has_suffix: bool = False) -> int | None:
        """Return the size of the dimension of tokens; of a view, what is after it: so much may not change."""
        places = [place for place, size in enumerate(one.shape) if size % self._prime == 0]
        if len(places) > 1:
            raise NotAlone("mixes tokens")
        if not places:
            return None
        return prod(one.shape[places[0] + 1 :]) if has_suffix else one.shape[places[0]]

    def _keeps_rows(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = base_name(func)
        if name.endswith("softmax"):
            return bool(args[0].shape[given_arguments(func, args, kwargs)["dim"]] % self._prime)
        if func is TO_COPY or is_pointwise(func) or name in _KEEPING_ROWS:
            return True
        return family_of(func) in (Family.VIEW, Family.NORM) and name not in _OTHER_VIEWS
